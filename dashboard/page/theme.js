// Runs before the first paint, so that a chosen theme does not flash.
"use strict";
(() => {
  const NAME = "kakeya-theme";
  const THEMES = ["system", "light", "dark"];
  const stored = () => {
    try {
      return localStorage.getItem(NAME) ?? "system";
    } catch {
      return "system"; // Storage can be switched off.
    }
  };
  const apply = (theme) => {
    const known = THEMES.includes(theme) ? theme : "system";
    document.documentElement.dataset.theme = known;
    return known;
  };
  apply(stored());
  window.kakeyaTheme = {
    get current() {
      return document.documentElement.dataset.theme;
    },
    /** The next of system, light, dark; kept for the next visit. */
    next() {
      const theme = apply(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // Then it lasts as long as the page.
      }
      return theme;
    },
  };
})();
