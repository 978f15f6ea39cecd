// The second wall: even if the parser let something through, only these tags and attributes reach the page.
import DOMPurify from "dompurify";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const ATTRIBUTES = ["href", "target", "rel", "class", "start", "data-language", "title"];

export function sanitize(html: string): DocumentFragment {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ADD_URI_SAFE_ATTR: ["target", "rel", "data-language", "title"],
    RETURN_DOM_FRAGMENT: true,
  });
}
