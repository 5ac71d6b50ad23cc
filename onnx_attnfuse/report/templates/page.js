(function () {
  "use strict";
  var root = document.documentElement, order = ["auto", "light", "dark"];
  function stored() { try { return localStorage.getItem("attnfuse-theme"); } catch (error) { return null; } }
  function show(theme) {
    if (theme === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", theme); }
    var button = document.getElementById("theme");
    if (button) { button.textContent = "Theme: " + theme; button.hidden = false; }
    return theme;
  }
  var theme = show(order.indexOf(stored()) < 0 ? "auto" : stored());
  document.addEventListener("DOMContentLoaded", function () {
    show(theme);
    document.querySelectorAll(".scroll").forEach(function (item) {
      item.scrollLeft = (item.scrollWidth - item.clientWidth) / 2;
    });
    document.getElementById("theme").addEventListener("click", function () {
      theme = show(order[(order.indexOf(theme) + 1) % order.length]);
      try { localStorage.setItem("attnfuse-theme", theme); } catch (error) { /* shown all the same */ }
    });
  });
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (item) { item.open = true; });
  });
})();
