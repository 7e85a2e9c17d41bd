// Names for what the theme leaves without one, for screen readers.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document
    .querySelectorAll(".md-code__nav")
    .forEach((nav, i) => nav.setAttribute("aria-label", `Code ${i + 1}`));
});
