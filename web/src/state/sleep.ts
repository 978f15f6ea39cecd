// A computer that slept has connections that look open and are not. Time that jumped tells, whatever the reason.

const TICK_MS = 4000;
const SLEPT_MS = 20_000; // hidden tabs are woken once a second at least for minutes, then once a minute
const HIDDEN_MS = 60_000;

/** Call `onWake` after a sleep, and when a tab comes back that was hidden for long. Call once. */
export function watchWake(onWake: () => void): void {
  let last = Date.now();
  let hiddenAt: number | null = null;
  setInterval(() => {
    const slept = Date.now() - last > SLEPT_MS && !document.hidden;
    last = Date.now();
    if (slept) onWake();
  }, TICK_MS);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) hiddenAt = Date.now();
    else if (hiddenAt !== null && Date.now() - hiddenAt > HIDDEN_MS) onWake();
    last = Date.now();
  });
}
