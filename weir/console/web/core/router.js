// Routes in the hash: `#/models/NAME/try?version=1`. Each segment is decoded; views are chosen by the first one.

import { useEffect, useState } from "./html.js";

/** The route of a hash: `{path: [segments], query: {name: value}}`. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return {
    path: path.split("/").filter(Boolean).map(decoded),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The hash of a route. */
export function link(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return `#/${path.map(encodeURIComponent).join("/")}${search}`;
}

/** Goes to a route. */
export function go(path, query) {
  location.hash = link(path, query);
}

/** Takes the place of the current route, without an entry in the history. */
export function replace(path, query) {
  history.replaceState(null, "", link(path, query));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Changes the query of the current route without an entry in the history. */
export function replaceQuery(changes) {
  const { path, query } = parse(location.hash);
  replace(path, { ...query, ...changes });
}

/** The current route, as state of a component. */
export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const listener = () => setRoute(parse(location.hash));
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return route;
}
