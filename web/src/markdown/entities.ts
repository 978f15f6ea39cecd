// Replaces the `entities` package in the build (vite.config.mjs): the browser decodes the 2,231 names itself, the
// package would add 15 KB.

const area = document.createElement("textarea"); // its content is always parsed as text

/** Decode one reference such as `&ouml;` or `&#35;`; anything else is returned unchanged. */
export function decodeHTMLStrict(reference: string): string {
  if (!/^&[#\w]+;$/.test(reference)) return reference;
  area.innerHTML = reference;
  return area.value;
}
