// Sets the colours before the first paint: this script is no module, so it runs before the page is drawn.
// `data-theme` of <html> is "light" or "dark"; the choice is kept in localStorage, "auto" follows the system.
(() => {
  const KEY = "weir-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");

  function stored() {
    try {
      return localStorage.getItem(KEY) || "auto";
    } catch {
      return "auto"; // storage is disabled
    }
  }

  function apply(choice) {
    const theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    document.documentElement.dataset.theme = theme;
    document.documentElement.dataset.themeChoice = choice;
    document.dispatchEvent(new CustomEvent("themechange"));
  }

  window.weirTheme = {
    get choice() {
      return document.documentElement.dataset.themeChoice;
    },
    choose(choice) {
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // It holds until the page is closed.
      }
      apply(choice);
    },
  };
  system.addEventListener("change", () => apply(window.weirTheme.choice));
  apply(stored());
})();
