// Formulas, drawn as soon as they are complete. KaTeX is fetched for the first one; until then TeX stands there as text.
const MAX_TEX_CHARS = 5000;
const MAX_CACHED = 300;

type DrawFormula = (tex: string, display: boolean) => HTMLElement | null;

let drawTex: DrawFormula | null = null;
let katexLoading: Promise<void> | null = null;
const cache = new Map<string, HTMLElement | null>(); // the open block is drawn again and again, its formulas are not

/** Draw every formula below `root`, now or when KaTeX has arrived. */
export function drawFormulas(root: DocumentFragment): void {
  const formulas = root.querySelectorAll<HTMLElement>(".math");
  if (formulas.length === 0) return;
  if (drawTex) {
    formulas.forEach(showFormula);
    return;
  }
  katexLoading ??= import("./katex").then(
    (module) => void (drawTex = module.drawFormula),
    () => void (katexLoading = null), // the chunk did not arrive; the TeX stays, the next formula asks again
  );
  void katexLoading.then(() => drawTex && formulas.forEach(showFormula));
}

function showFormula(place: HTMLElement): void {
  const tex = place.textContent ?? "";
  if (!place.classList.contains("math") || tex.length > MAX_TEX_CHARS) return;
  const display = place.classList.contains("math-display");
  const key = `${display} ${tex}`;
  if (!cache.has(key)) {
    if (cache.size >= MAX_CACHED) cache.clear();
    cache.set(key, drawTex!(tex, display));
  }
  const drawn = cache.get(key);
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
