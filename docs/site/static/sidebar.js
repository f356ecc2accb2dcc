// Mark the entry of this page in the sidebar, which the pages of a group share, and show it.
addEventListener("DOMContentLoaded", () => {
  const page = location.pathname.split("/").pop();
  const bar = document.querySelector(".sidebar-scroll");
  const entry = document.querySelector(`.sidebar-tree a[href="${page}"]`)?.parentElement;
  if (!bar || !entry) return;
  document.querySelector(".sidebar-tree .current-page")?.classList.remove("current-page");
  entry.classList.add("current-page");
  bar.scrollTop += entry.getBoundingClientRect().top - bar.getBoundingClientRect().top - 80;
});
