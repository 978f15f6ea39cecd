// Replace nodes by newer ones, but keep what did not change: a selection, a scrolled table, a hovered link survive.

/** Put `fresh` where `old` stood (at the end of `root` if nowhere); returns the nodes that stand there now. */
export function patchNodes(root: Node, old: readonly ChildNode[], fresh: readonly ChildNode[]): ChildNode[] {
  const now = fresh.map((node, index) => {
    const before = old[index];
    if (!before || before.parentNode !== root) return root.appendChild(node);
    return updateNode(before, node);
  });
  for (const node of old.slice(fresh.length)) node.remove();
  return now;
}

function updateNode(before: ChildNode, after: ChildNode): ChildNode {
  if (before.isEqualNode(after)) return before;
  if (before instanceof Text && after instanceof Text) {
    if (after.data.startsWith(before.data)) before.appendData(after.data.slice(before.length));
    else before.data = after.data;
    return before;
  }
  if (before instanceof Element && after instanceof Element && sameKind(before, after)) {
    patchNodes(before, [...before.childNodes], [...after.childNodes]);
    return before;
  }
  before.replaceWith(after);
  return after;
}

/** Same tag and attributes. Drawn formulas are taken whole: half of two of them is none. */
function sameKind(before: Element, after: Element): boolean {
  if (before.tagName !== after.tagName || before.matches(".math, .math-drawn, .math-wrong")) return false;
  return before.cloneNode(false).isEqualNode(after.cloneNode(false));
}
