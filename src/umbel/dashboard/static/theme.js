// Before anything is drawn: the colours that were chosen, if any were.
"use strict";
(() => {
  const chosen = localStorage.getItem("umbel-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
