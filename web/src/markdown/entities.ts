// Stands in for the `entities` package in the build (vite.config.mjs): the browser knows the 2,231 names by heart, the
// package brings them as 15 KB.

const area = document.createElement("textarea"); // its content is text, whatever it looks like

/** Decode one reference such as `&ouml;` or `&#35;`; what is none stays as it is. */
export function decodeHTMLStrict(reference: string): string {
  if (!/^&[#\w]+;$/.test(reference)) return reference;
  area.innerHTML = reference;
  return area.value;
}
