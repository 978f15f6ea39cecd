// Markdown to HTML with active content removed: no raw HTML, no images, no links other than http(s) and mailto. The
// result is sanitized again (`sanitize`), so that neither step is the only protection.

import DOMPurify from "dompurify";
import MarkdownIt, { type Token } from "markdown-it";
import { addMath } from "./math";

export type Parser = InstanceType<typeof MarkdownIt>;

const LINK = /^(https?:|mailto:)/i;
const MAX_ADDRESS = 64;

export function makeParser(): Parser {
  const md = new MarkdownIt({ html: false, linkify: true, breaks: true, typographer: false });
  md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
  md.validateLink = (url: string) => LINK.test(url.trim());

  md.renderer.rules.link_open = (tokens, index, options, _env, self) => {
    const token = tokens[index]!;
    token.attrSet("target", "_blank");
    token.attrSet("rel", "noopener noreferrer nofollow");
    return self.renderToken(tokens, index, options);
  };
  // An image would send a request to another host. It becomes a link that shows the address.
  md.renderer.rules.image = (tokens, index) => {
    const token = tokens[index]!;
    const source = String(token.attrGet("src") ?? "");
    const inside = `<span class="image-name">${md.utils.escapeHtml(token.content || "image")}</span>
<span class="image-address">${md.utils.escapeHtml(shortAddress(source))}</span>`;
    if (insideLink(tokens, index)) return `<span class="image-chip">${inside}</span>`;
    const href = md.utils.escapeHtml(source);
    return `<a class="image-chip" href="${href}" title="${href}" target="_blank" rel="noopener noreferrer nofollow">${inside}</a>`;
  };
  // Each block takes its direction from its own text.
  for (const rule of ["paragraph_open", "heading_open", "bullet_list_open", "ordered_list_open"] as const) {
    md.renderer.rules[rule] = (tokens, index, options, _env, self) => {
      const token = tokens[index]!;
      if (!token.hidden) token.attrSet("dir", "auto");
      return self.renderToken(tokens, index, options);
    };
  }
  // Column alignment as a class: the content security policy forbids style attributes.
  for (const rule of ["th_open", "td_open"] as const) {
    md.renderer.rules[rule] = (tokens, index, options, _env, self) => {
      const token = tokens[index]!;
      const align = /text-align:(\w+)/.exec(String(token.attrGet("style") ?? ""))?.[1];
      token.attrs = [["dir", "auto"], ...(align ? ([["class", `align-${align}`]] as [string, string][]) : [])];
      return self.renderToken(tokens, index, options);
    };
  }
  md.renderer.rules.table_open = () => '<div class="table-wrap"><table>';
  md.renderer.rules.table_close = () => "</table></div>";
  md.renderer.rules.fence = (tokens, index) => {
    const token = tokens[index]!;
    return codeHtml(md, token.content, token.info.trim().split(/\s+/)[0] ?? "");
  };
  md.renderer.rules.code_block = (tokens, index) => codeHtml(md, tokens[index]!.content, "");
  addMath(md);
  return md;
}

function codeHtml(md: Parser, code: string, info: string): string {
  const language = /^[\w#+.-]{1,24}$/.test(info) ? info : "";
  return `<pre><code data-language="${md.utils.escapeHtml(language)}">${md.utils.escapeHtml(code)}</code></pre>`;
}

function insideLink(tokens: readonly Token[], index: number): boolean {
  let depth = 0;
  for (const token of tokens.slice(0, index))
    depth += Number(token.type === "link_open") - Number(token.type === "link_close");
  return depth > 0;
}

/** Return the address without its scheme, shortened in the middle: the host must stay visible. */
function shortAddress(address: string): string {
  const bare = address.replace(/^https?:\/\//i, "");
  return bare.length <= MAX_ADDRESS ? bare : `${bare.slice(0, MAX_ADDRESS - 16)}…${bare.slice(-15)}`;
}

// -- Second protection: only these tags and attributes reach the page, even if the parser lets others through

const TAGS = [
  "a",
  "blockquote",
  "br",
  "code",
  "del",
  "div",
  "em",
  "h1",
  "h2",
  "h3",
  "h4",
  "h5",
  "h6",
  "hr",
  "li",
  "ol",
  "p",
  "pre",
  "s",
  "span",
  "strong",
  "table",
  "tbody",
  "td",
  "th",
  "thead",
  "tr",
  "ul",
];
const ATTRIBUTES = ["dir", "href", "target", "rel", "class", "start", "data-language", "title"];

export function sanitize(html: string): DocumentFragment {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ADD_URI_SAFE_ATTR: ["dir", "target", "rel", "data-language", "title"],
    RETURN_DOM_FRAGMENT: true,
  });
}
