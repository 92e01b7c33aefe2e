// `html` is htm bound to Preact: texts become text nodes, so what the server sends is never parsed as HTML.
import { h } from "preact";
import htm from "/web/vendor/htm.mjs";

export const html = htm.bind(h);
export { h, render, Fragment, Component } from "preact";
export { useCallback, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState } from "/web/vendor/hooks.mjs";
