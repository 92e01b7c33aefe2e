// Keys of the whole page: `g` and the letter of a view, `/`, `?`.

import { useEffect } from "./html.js";
import { go } from "./router.js";

const SEQUENCE_MS = 1500;

function isTyping(target) {
  return target instanceof Element && target.closest("input, textarea, select, [contenteditable]") !== null;
}

/** Listens for keys while the component is mounted. */
export function useKeys(views, { openHelp, openFinder }) {
  useEffect(() => {
    let gPressedMs = -Infinity;
    function onKeyDown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return;
      if (event.key === "?") openHelp();
      else if (event.key === "/") openFinder();
      else if (event.key === "g") {
        gPressedMs = event.timeStamp;
        return;
      } else {
        const view = event.timeStamp - gPressedMs < SEQUENCE_MS ? views.find((one) => one.key === event.key) : null;
        gPressedMs = -Infinity;
        if (!view) return;
        go([view.id]);
      }
      event.preventDefault();
    }
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
}
