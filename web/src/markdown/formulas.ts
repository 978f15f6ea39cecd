// Formulas, drawn as soon as they are complete. KaTeX is fetched for the first one; until then TeX stands there as text.
const MAX_CHARS = 5000;
const MAX_KEPT = 300;

type Draw = (tex: string, display: boolean) => HTMLElement | null;

let draw: Draw | null = null;
let loading: Promise<void> | null = null;
const kept = new Map<string, HTMLElement | null>(); // the open block is drawn again and again, its formulas are not

/** Draw every formula below `root`, now or when KaTeX has arrived. */
export function drawFormulas(root: DocumentFragment): void {
  const formulas = root.querySelectorAll<HTMLElement>(".math");
  if (formulas.length === 0) return;
  if (draw) {
    formulas.forEach(show);
    return;
  }
  loading ??= import("./katex").then(
    (module) => void (draw = module.drawFormula),
    () => void (loading = null), // the chunk did not arrive; the TeX stays, the next formula asks again
  );
  void loading.then(() => draw && formulas.forEach(show));
}

function show(place: HTMLElement): void {
  const tex = place.textContent ?? "";
  if (!place.classList.contains("math") || tex.length > MAX_CHARS) return;
  const display = place.classList.contains("math-display");
  const key = `${display} ${tex}`;
  if (!kept.has(key)) {
    if (kept.size >= MAX_KEPT) kept.clear();
    kept.set(key, draw!(tex, display));
  }
  const drawn = kept.get(key);
  place.classList.remove("math");
  if (!drawn) {
    place.classList.add("math-wrong");
    return;
  }
  place.classList.add("math-drawn");
  place.replaceChildren(...drawn.cloneNode(true).childNodes);
  if (!display) return;
  place.tabIndex = 0; // a wide formula scrolls; the keyboard must reach it
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", "Formula");
}
