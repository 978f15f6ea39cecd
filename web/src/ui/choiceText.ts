// How tokens and their shares are written.

export function formatPercent(share: number): string {
  if (share >= 0.0995) return `${Math.round(share * 100)} %`;
  return share >= 0.00095 ? `${(share * 100).toFixed(1)} %` : "< 0.1 %";
}

/** White space that can be seen. */
export function showWhitespace(text: string): string {
  if (text === "") return "(nothing)";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}
