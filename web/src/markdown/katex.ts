// KaTeX with its fonts: a chunk of its own, see formulas.ts. It builds DOM nodes and sets styles on them one by one, which
// the page's policy allows; markup with `style` attributes, KaTeX's other output, it would not.
import katex from "katex";
import "katex/dist/katex.min.css";

const MAX_EXPANSIONS = 300;
const MAX_EM = 30;

/** Draw a formula; null where it is not TeX. `trust: false`: no links, images, classes or styles from the model. */
export function drawFormula(tex: string, display: boolean): HTMLElement | null {
  const box = document.createElement("span");
  try {
    katex.render(tex, box, {
      displayMode: display,
      throwOnError: true,
      strict: "ignore",
      trust: false,
      macros: { "\\pmb": "\\boldsymbol" }, // KaTeX's own writes a style attribute
      maxExpand: MAX_EXPANSIONS,
      maxSize: MAX_EM,
    });
  } catch {
    return null;
  }
  return box;
}
