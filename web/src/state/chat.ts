// The page's verbs: send, stop, regenerate, edit, pick, switch, open. They change threads and speak to the server.
import { computed, signal } from "@preact/signals";
import type { CreateFrame, ServerFrame, Session } from "../wire/frames";
import { setApiKey } from "../wire/key";
import { Socket, socketUrl } from "../wire/socket";
import { announce } from "./announcer";
import { Conversations } from "./conversations";
import { Drafts } from "./drafts";
import { Forks } from "./forks";
import { Keeper } from "./keeper";
import { type Lane, Lanes } from "./lanes";
import { placeAfter, placeInside, placeOf } from "./place";
import { ReadinessWatch } from "./readiness";
import { requestFields } from "./request";
import { type Sampling, sampling, systemPrompt } from "./settings";
import { Thread } from "./thread";
import { toast } from "./toast";
import type { Message } from "./tree";
import { type Start, Turn } from "./turn";

export class Chat {
  readonly conversations = new Conversations();
  readonly readiness = new ReadinessWatch();
  readonly session = signal<Session | null>(null);
  readonly thread = signal(new Thread());
  readonly socket: Socket;
  readonly live = computed(() => this.thread.value.live.value);
  readonly ready = computed(() => {
    const blocked = ["loading", "unavailable"].includes(this.readiness.now.value.phase);
    return this.socket.state.value === "open" && this.thread.value.state.value === "ready" && !blocked;
  });
  readonly drafts: Drafts;
  readonly forks = new Forks(this);
  private readonly threads = new Map<string, Thread>();
  private readonly keeper = new Keeper(this.conversations);
  private readonly lanes: Lanes;
  private count = 0;

  constructor(url = socketUrl()) {
    this.socket = new Socket(url, (frame) => this.receive(frame));
    this.lanes = new Lanes(this.socket, this.keeper, {
      created: (lane, conversation) => this.created(lane, conversation),
      settled: (lane) => this.settled(lane),
    });
    const next = () => placeAfter(this.thread.value, this.thread.value.tree.value.leaf.value?.key ?? null);
    const place = () => (this.ready.value && !this.live.value ? next() : null);
    this.drafts = new Drafts(place, (frame) => this.socket.send(frame));
    this.socket.opened.subscribe((times) => {
      if (times > 0) void this.readiness.watch();
      this.drafts.forget();
      if (times > 1) this.recover();
    });
    systemPrompt.subscribe((text) => void this.keeper.keepSystemPrompt(this.thread.peek(), text));
  }

  /** Connect and fill the list; or stop at a locked door until a key is given. */
  async start(): Promise<void> {
    this.socket.connect();
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") this.socket.refuse();
  }

  async unlock(key: string): Promise<void> {
    setApiKey(key);
    await this.conversations.refresh();
    if (this.conversations.state.value === "locked") {
      toast("The server does not know this key.");
      return;
    }
    this.socket.admit();
    const id = this.thread.value.id.value;
    if (id !== null) await this.keeper.load(this.thread.value, id);
  }

  // -- verbs ------------------------------------------------------------------------------------------------------

  /** Say something after the shown leaf. `only` changes the sampling of this one turn. */
  send(text: string, only: Partial<Sampling> = {}): void {
    const thread = this.thread.value;
    if (thread.live.value || thread.state.value !== "ready") return;
    const tree = thread.tree.value;
    const leaf = tree.leaf.value;
    const turn = leaf ? thread.turnOf(leaf) : undefined;
    if (turn) turn.open.value = false; // going on is a pick
    const user = tree.add({ key: this.newKey("user"), parent: leaf?.key ?? null, role: "user", text });
    thread.next.value = thread.next.value.filter((suggestion) => suggestion !== text);
    this.generate(thread, user, only);
  }

  /** Ask again for the answer to the same message: a sibling, nothing is lost. */
  regenerate(answer: Message): void {
    const thread = this.thread.value;
    const user = answer.parent === null ? undefined : thread.tree.value.get(answer.parent);
    if (user && !thread.live.value) this.generate(thread, user);
  }

  /** Answer a user message that has none. */
  answer(user: Message): void {
    if (!this.thread.value.live.value) this.generate(this.thread.value, user);
  }

  /** Say it differently: a branch beside the old message. */
  edit(message: Message, text: string): void {
    const thread = this.thread.value;
    if (thread.live.value) return;
    const tree = thread.tree.value;
    this.generate(thread, tree.add({ key: this.newKey("user"), parent: message.parent, role: "user", text }));
  }

  /** Go on inside an answer: another one beside it, with the same beginning. */
  goOnInside(answer: Message, start: Start): void {
    const thread = this.thread.value;
    const user = answer.parent === null ? undefined : thread.tree.value.get(answer.parent);
    if (user && !thread.live.value) this.generate(thread, user, { n: 1, search: "sample" }, start);
  }

  stop(): void {
    const turn = this.live.value;
    if (turn) this.lanes.stop(turn);
  }

  /** Settle on one candidate. The others stay as its siblings. */
  pick(message: Message): void {
    const thread = this.thread.value;
    const turn = thread.turnOf(message);
    if (turn) turn.open.value = false;
    const place = turn ? turn.candidates.indexOf(message) + 1 : 1;
    announce(`Picked answer ${place}.`);
    this.choose(message);
  }

  /** Give up one candidate while the others go on; its pages return at once. */
  drop(message: Message): void {
    const thread = this.thread.value;
    const turn = thread.turnOf(message);
    if (!turn?.canDrop(message)) return;
    this.lanes.drop(turn, message);
    const other = turn.candidates.find((each) => each !== message && turn.canDrop(each));
    if (other && thread.tree.value.path.value.includes(message)) thread.tree.value.choose(other);
    announce(`Dropped answer ${turn.candidates.indexOf(message) + 1}.`);
  }

  choose(message: Message): void {
    const thread = this.thread.value;
    thread.tree.value.choose(message);
    this.keeper.keepLeaf(thread);
  }

  /** A system prompt belongs to its conversation; a new one starts without. */
  newConversation(): void {
    this.thread.value = new Thread();
    systemPrompt.value = "";
  }

  async open(id: string): Promise<void> {
    const known = this.threads.get(id);
    const thread = known ?? new Thread();
    thread.id.value = id;
    this.threads.set(id, thread);
    this.thread.value = thread;
    if (known && (known.live.value || known.state.value === "ready")) {
      systemPrompt.value = this.conversations.find(id)?.metadata?.["system"] ?? "";
      return;
    }
    const system = await this.keeper.load(thread, id);
    if (system !== null && this.thread.value === thread) systemPrompt.value = system;
  }

  remove(id: string): void {
    this.conversations.remove(id);
    this.threads.delete(id);
    if (this.thread.value.id.value === id) this.newConversation();
  }

  isLive(id: string): boolean {
    return (this.threads.get(id)?.live.value ?? null) !== null;
  }

  // -- the server ---------------------------------------------------------------------------------------------------

  private generate(thread: Thread, user: Message, only: Partial<Sampling> = {}, start: Start | null = null): void {
    const tree = thread.tree.value;
    const key = this.newKey("turn");
    const settings = { ...sampling.value, ...only };
    const candidates = Array.from({ length: settings.n }, (_, index) =>
      tree.add(
        { key: `${key}-${index}`, parent: user.key, role: "assistant", turn: key, status: "waiting" },
        index === 0,
      ),
    );
    const turn = new Turn(key, candidates, settings.search === "beam", start);
    const frame: CreateFrame = {
      type: "response.create",
      stream_id: key,
      ...(start ? placeInside(start) : placeOf(thread, user)),
      ...(systemPrompt.value && !start ? { instructions: systemPrompt.value } : {}), // an answer goes on under its own
      explain: true,
      ...requestFields(settings),
    };
    const limit = this.session.value?.limits.max_frame_bytes ?? Infinity;
    if (new TextEncoder().encode(JSON.stringify(frame)).length > limit) {
      this.lanes.refuse(turn, `This message is too long to send (the limit is ${Math.floor(limit / 1024)} KiB).`);
      return;
    }
    this.lanes.begin(thread, turn, user, frame);
  }

  private receive(frame: ServerFrame): void {
    if (frame.type === "session.created") this.session.value = frame.session;
    if (frame.type === "conversation.updated") this.conversations.upsert(frame.conversation);
    if (frame.type === "prompt.prewarmed") this.drafts.take(frame);
    if (frame.type === "error" && frame.status === 503) void this.readiness.watch();
    if (this.lanes.receive(frame)) return;
    // a stop that came a moment after the end names a response that no longer runs: nothing to tell
    if (frame.type !== "error" || frame.error.param === "response_id" || this.drafts.refused()) return;
    toast(frame.error.message);
  }

  private created({ thread }: Lane, conversation: string | null): void {
    if (thread.id.value !== null || conversation === null) return;
    thread.id.value = conversation;
    this.threads.set(conversation, thread);
    if (thread === this.thread.value) void this.keeper.keepSystemPrompt(thread, systemPrompt.value);
  }

  private settled({ thread, turn }: Lane): void {
    if (turn.candidates.indexOf(thread.tree.value.leaf.value!) > 0) this.keeper.keepLeaf(thread);
  }

  /** The connection is back. */
  private recover(): void {
    void this.conversations.refresh();
    this.lanes.recover();
  }

  private newKey(kind: string): string {
    return `${kind}-${Date.now().toString(36)}-${++this.count}`;
  }
}
