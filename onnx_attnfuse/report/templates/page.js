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
  document.addEventListener("DOMContentLoaded", function () {
    var find = document.getElementById("find");
    if (!find) { return; }
    find.hidden = false;
    find.addEventListener("input", function () {
      var words = find.value.toLowerCase().split(/\s+/);
      document.querySelectorAll(".contents li").forEach(function (item) {
        var link = item.querySelector("a[href^='#']"), card = link && document.querySelector(link.getAttribute("href"));
        var text = (item.textContent + (card ? card.textContent : "")).toLowerCase();
        item.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
        if (card) { card.hidden = item.hidden; }
      });
    });
  });
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (item) { item.open = true; });
  });
})();
