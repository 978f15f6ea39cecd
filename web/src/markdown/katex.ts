// KaTeX with its fonts, in its own chunk (see blocks.ts). It builds DOM nodes and sets styles through the DOM, which
// the page's content security policy allows; markup with `style` attributes would be blocked.
import katex from "katex";
import "katex/dist/katex.min.css";

const MAX_EXPANSIONS = 300;
const MAX_EM = 30;

/** Draw a formula; null if it is not valid TeX. `trust: false`: no links, images, classes or styles from the model. */
export function drawFormula(tex: string, display: boolean): HTMLElement | null {
  const box = document.createElement("span");
  try {
    katex.render(tex, box, {
      displayMode: display,
      throwOnError: true,
      strict: "ignore",
      trust: false,
      macros: { "\\pmb": "\\boldsymbol" }, // KaTeX's own definition writes a style attribute
      maxExpand: MAX_EXPANSIONS,
      maxSize: MAX_EM,
    });
  } catch {
    return null;
  }
  return box;
}
