declare module "markdown-it-footnote" {
  import type MarkdownIt from "markdown-it";

  const plugin: (md: InstanceType<typeof MarkdownIt>) => void;
  export default plugin;
}
