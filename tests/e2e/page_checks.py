"""Checks of what the page shows: accessibility, nothing beyond the screen, and touch targets that are large enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.requirements import require

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
RUN_AXE = """async rules => {
  // without frames: a preview has no origin, and axe would send messages to it that the browser warns of
  const options = {resultTypes: ['violations'], iframes: false, ...(rules && {runOnly: rules})};
  const {violations} = await axe.run(document, options);
  const described = node => `${node.html.slice(0, 120)} ${node.any.map(check => check.message)}`;
  return violations.map(({id, nodes}) => [id, ...nodes.map(described)].join(' '));
}"""

# Screen of a page by its width: a desktop, a laptop and two phones.
SCREENS: dict[int, dict[str, Any]] = {
    1440: {"viewport": {"width": 1440, "height": 900}},
    1280: {"viewport": {"width": 1280, "height": 800}},
    390: {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
    320: {"viewport": {"width": 320, "height": 568}, "is_mobile": True, "has_touch": True},
}

# Elements that reach beyond the screen, and areas that scroll sideways, except those of WIDE. The width is that of the
# screen: on a phone `innerWidth` grows with what does not fit.
BEYOND = """([width, height]) => {
  const WIDE = '.math-display, .table-wrap, pre, .candidates-scroll, .beam-scroll, .branch-scroll, .admin-table'
    + ', .confidence-choices, .composer-options, .tabs';
  const named = element => `${element.localName}.${element.getAttribute('class') ?? ''}`;
  const shown = [...document.querySelectorAll('body, body *')].filter(element => !element.closest('.sr-only, svg svg')
    && element.checkVisibility({visibilityProperty: true}));
  const found = [];
  for (const element of shown) {
    const {left, right, top, bottom} = element.getBoundingClientRect();
    const scrolls = /auto|scroll/.test(getComputedStyle(element).overflowX);
    if (scrolls && element.scrollWidth > element.clientWidth && !element.matches(WIDE))
      found.push(`${named(element)} scrolls sideways by ${element.scrollWidth - element.clientWidth} px`);
    if (right > left && (left < -1 || right > width + 1) && !element.parentElement.closest(WIDE))
      found.push(`${named(element)} from ${left.toFixed(0)} to ${right.toFixed(0)} px`);
    if (element.matches('dialog, :popover-open, .alternatives, .toasts, .composer') && (top < 0 || bottom > height))
      found.push(`${named(element)} from ${top.toFixed(0)} to ${bottom.toFixed(0)} px down`);
  }
  return found;
}"""

# Visible targets smaller than 44 px. Exempt, as in WCAG 2.5.5: links and marks within a text, which its line limits.
SMALL = """() => [...document.querySelectorAll(
    'button, select, input, textarea, summary, [role=tab], [role=button], [role=option], a[href]')].filter(element => {
  if (element.closest('.prose p, .prose li, .prose blockquote, .tokens, svg, [inert], .sr-only')) return false;
  if (element.closest('details:not([open])') && element.localName !== 'summary') return false;
  if (!element.checkVisibility({visibilityProperty: true, opacityProperty: true})) return false;
  const target = ['checkbox', 'radio', 'file', 'range'].includes(element.type) && element.labels[0] || element;
  const {width, height} = target.getBoundingClientRect();
  return width > 1 && (width < 43.9 || height < 43.9);
}).map(element => {
  const {width, height} = element.getBoundingClientRect();
  const name = element.getAttribute('aria-label') ?? element.textContent.slice(0, 30);
  return `${element.localName}.${element.className} ${name} ${width.toFixed(0)}x${height.toFixed(0)}`;
})"""


def find_problems(page: Any) -> list[str]:
    """Return what is wrong with the shown view in dark and in light: axe, places, and touch targets on a phone."""
    if not page.evaluate("'axe' in window"):
        require(AXE.is_file(), "axe-core", "cd web && npm ci")
        page.evaluate(AXE.read_text())  # not by a script tag: the content policy stays unchanged
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")  # without animations every colour is final
    found: list[str] = page.evaluate(RUN_AXE, ["color-contrast"])  # the other rules do not depend on colours
    page.emulate_media(color_scheme="light")
    found += page.evaluate(RUN_AXE) + find_beyond(page)
    if page.evaluate("matchMedia('(pointer: coarse)').matches"):
        found += [f"below 44 px: {target}" for target in page.evaluate(SMALL)]
    return found


def find_beyond(page: Any) -> list[str]:
    """Return what reaches beyond the screen, or scrolls sideways although it should not."""
    screen = page.viewport_size
    found: list[str] = page.evaluate(BEYOND, [screen["width"], screen["height"]])
    return found
