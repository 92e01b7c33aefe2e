// Keys of the whole page: `g` and the letter of a view, `/`, `?`.

import { useEffect } from "./html.js";
import { go } from "./router.js";

const SEQUENCE_MS = 1200;

function isTyping(target) {
  return target.closest?.("input, textarea, select, [contenteditable]") !== null && target.closest?.("input, textarea, select, [contenteditable]") !== undefined;
}

/** Listens for keys while the component is mounted. */
export function useKeys(views, { openHelp, openFinder }) {
  useEffect(() => {
    let gPressedMs = 0;
    function onKeyDown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return;
      if (event.key === "?") openHelp();
      else if (event.key === "/") openFinder();
      else if (event.key === "g") {
        gPressedMs = Date.now();
        return;
      } else {
        const view = Date.now() - gPressedMs < SEQUENCE_MS ? views.find((one) => one.key === event.key) : null;
        gPressedMs = 0;
        if (!view) return;
        go([view.id]);
      }
      event.preventDefault();
    }
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
}
