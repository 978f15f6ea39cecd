// Runs before the first paint, so that a chosen theme does not flash the other one.
try {
  const theme = JSON.parse(localStorage.getItem("chatcache.theme"));
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // no storage: follow the system
}
