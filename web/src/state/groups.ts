// The list of conversations by day: pinned ones, today, yesterday, the last week, the last month, then months.
import type { WireConversation } from "../wire/frames";
import { isPinned } from "./metadata";

export interface Group {
  readonly name: string;
  readonly conversations: readonly WireConversation[];
}

const DAY_MS = 24 * 60 * 60 * 1000;

/** `conversations`: newest first. `nowMs`: the present, by the clock of the reader. */
export function groupByDay(conversations: readonly WireConversation[], nowMs: number): readonly Group[] {
  const names = new Map<string, WireConversation[]>();
  const pinned = conversations.filter((conversation) => isPinned(conversation.metadata));
  if (pinned.length > 0) names.set("Pinned", pinned);
  for (const conversation of conversations) {
    if (isPinned(conversation.metadata)) continue;
    const name = dayName(conversation.updated_at * 1000, nowMs);
    const group = names.get(name) ?? [];
    group.push(conversation);
    names.set(name, group);
  }
  return [...names].map(([name, group]) => ({ name, conversations: group }));
}

export function dayName(thenMs: number, nowMs: number): string {
  const days = calendarDay(nowMs) - calendarDay(thenMs);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  const then = new Date(thenMs);
  const year = then.getFullYear() === new Date(nowMs).getFullYear() ? {} : ({ year: "numeric" } as const);
  return new Intl.DateTimeFormat("en", { month: "long", ...year }).format(then);
}

/** Counts days of the reader's calendar, whatever the clock was turned by between them. */
function calendarDay(ms: number): number {
  const date = new Date(ms);
  return Math.round(Date.UTC(date.getFullYear(), date.getMonth(), date.getDate()) / DAY_MS);
}
