// For screen readers and keyboards: names where the theme gives none, and wide tables in the tab order.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document
    .querySelectorAll(".md-code__nav")
    .forEach((nav, i) => nav.setAttribute("aria-label", `Code ${i + 1}`));
});
// the theme wraps tables later, one after the other
new MutationObserver(() =>
  document
    .querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")
    .forEach((table) => table.setAttribute("tabindex", "0")),
).observe(document.documentElement, { childList: true, subtree: true });
