// The page's verbs: send, stop, regenerate, edit, pick, switch, open. They change threads and speak to the server.
import { computed, effect, signal, untracked } from "@preact/signals";
import type { CreateFrame, ServerFrame, Session, WireConversation } from "../wire/frames";
import { Socket, socketUrl } from "../wire/socket";
import { announce } from "./announcer";
import { Conversations } from "./conversations";
import { Door, leaveAll } from "./door";
import { Drafts } from "./drafts";
import { Follower } from "./follower";
import { Forks } from "./forks";
import { Keeper } from "./keeper";
import { type Lane, Lanes, ending } from "./lanes";
import { placeAfter, placeInside, placeOf } from "./place";
import { ProfileKeeper } from "./profile";
import { ReadinessWatch } from "./readiness";
import { requestFields } from "./request";
import { Search } from "./search";
import { type Sampling, namesChats, sampling, systemPrompt } from "./settings";
import { Thread } from "./thread";
import { Titler } from "./titles";
import { toast } from "./toast";
import type { Message } from "./tree";
import { type Start, Turn } from "./turn";
import { Warmth } from "./warmth";

// What a stop or a drop names that came a moment after the end: nothing to tell.
const TOO_LATE = new Set(["response_id", "candidate"]);

export class Chat {
  readonly conversations = new Conversations((head) => this.threads.get(head.id)?.know(head));
  readonly search = new Search();
  readonly warmth = new Warmth(() => this.conversations.shown.peek().map(({ id }) => id));
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
  readonly titler = new Titler(this.conversations);
  private readonly threads = new Map<string, Thread>();
  private readonly born = new Set<string>(); // conversations that began here, their heads not heard of yet
  private readonly keeper = new Keeper(this.conversations);
  private readonly profile = new ProfileKeeper(this.conversations);
  private readonly door: Door;
  private readonly lanes: Lanes;
  private readonly follower: Follower;
  private count = 0;

  constructor(url = socketUrl(), startOver = leaveAll) {
    this.socket = new Socket(url, (frame) => this.receive(frame));
    this.lanes = new Lanes(this.socket, this.keeper, {
      created: (lane, conversation) => this.created(lane, conversation),
      settled: (lane) => this.settled(lane),
    });
    const next = () => placeAfter(this.thread.value, this.thread.value.tree.value.leaf.value?.key ?? null);
    const place = () => (this.ready.value && !this.live.value ? next() : null);
    this.drafts = new Drafts(place, (frame) => this.socket.send(frame));
    this.follower = new Follower(this.socket, this.conversations, this.keeper, this.lanes, {
      shown: () => this.thread.peek(),
      changed: (before, now) => this.changedElsewhere(before, now),
      deleted: (id) => this.deletedElsewhere(id),
    });
    this.socket.opened.subscribe((times) => {
      this.drafts.forget();
      if (times === 0) return;
      void this.readiness.watch();
      this.follower.connected();
      if (times > 1) this.recover();
    });
    this.door = new Door(this.socket, this.conversations, startOver);
    effect(() => {
      void [systemPrompt.value, sampling.value];
      const thread = this.thread.peek();
      if (thread.state.peek() === "ready") untracked(() => this.profile.changed(thread.id.value));
    });
  }

  /** Connect and fill the list; or stop at a locked door until a key is given. */
  async start(): Promise<void> {
    if (await this.door.enter()) this.warmth.soon();
  }

  /** Hand in a key for a session. */
  async unlock(key: string): Promise<void> {
    if (!(await this.door.unlock(key))) return;
    const id = this.thread.value.id.value;
    if (id !== null) await this.open(id);
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
    void this.keeper.keepLeaf(thread);
  }

  newConversation(): void {
    this.thread.value = new Thread();
    this.profile.showDefaults();
  }

  async open(id: string): Promise<void> {
    void this.profile.flush();
    const thread = this.threads.get(id) ?? new Thread();
    thread.id.value = id;
    this.threads.set(id, thread);
    this.thread.value = thread;
    this.conversations.seen(id);
    this.profile.show(this.conversations.find(id));
    if (thread.state.value !== "ready" || !thread.isLoaded) {
      const head = await this.keeper.load(thread, id);
      if (head && this.thread.value === thread) this.profile.show(head);
    }
    await this.follower.check(thread);
  }

  remove(id: string): void {
    const isShown = this.thread.value.id.value === id;
    this.conversations.remove(id, () => isShown && void this.open(id));
    if (isShown) this.newConversation();
  }

  isLive(id: string): boolean {
    return this.conversations.runningIn(id).length > 0 || (this.threads.get(id)?.live.value ?? null) !== null;
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
    if (frame.type === "prompt.prewarmed") this.drafts.take(frame);
    if (frame.type === "error" && frame.status === 503) void this.readiness.watch();
    if (frame.type === "conversation.updated" && !frame.running) this.updatedHere(frame.conversation);
    this.follower.receive(frame);
    if (this.lanes.receive(frame)) return;
    if (frame.type !== "error" || TOO_LATE.has(frame.error.param ?? "") || this.drafts.refused()) return;
    toast(frame.error.message);
  }

  private created({ thread }: Lane, conversation: string | null): void {
    if (thread.id.value === null && conversation !== null) {
      thread.id.value = conversation;
      thread.isLoaded = true;
      this.threads.set(conversation, thread);
      this.born.add(conversation);
    }
    if (thread === this.thread.value) void this.follower.look(thread);
  }

  /** A response that is sent to this page changed its conversation. */
  private updatedHere(head: WireConversation): void {
    this.conversations.changed(head);
    if (!this.born.delete(head.id)) return;
    this.titler.began(head);
    if (this.thread.value.id.value === head.id) this.profile.begin(head.id);
  }

  private settled({ thread, turn }: Lane): void {
    const id = thread.id.value;
    const isShown = thread === this.thread.value;
    void this.keep(thread, turn);
    if (turn.failed) void this.readiness.watch(); // perhaps the model is gone
    if (id === null) return announce(ending(turn));
    const title = this.conversations.find(id)?.title ?? "another conversation";
    announce(isShown ? ending(turn) : `${ending(turn)} It is in ${title}.`);
    if (!isShown) this.conversations.markUnseen(id);
    this.conversations.setRunning(id, this.conversations.runningIn(id).filter((other) => other !== turn.responseId.value));
    this.warmth.soon();
  }

  /** What is told to the server after a turn: one thing after the other, as each is a change of the conversation. */
  private async keep(thread: Thread, turn: Turn): Promise<void> {
    if (turn.candidates.indexOf(thread.tree.value.leaf.value!) > 0) await this.keeper.keepLeaf(thread);
    await this.profile.flush();
    const said = !turn.failed && turn.candidates.some((message) => message.text.value !== ""); // stopped early, there is none
    if (namesChats(this.session.value?.model) && said && thread.id.value !== null) await this.titler.answered(thread.id.value);
  }

  private changedElsewhere(before: WireConversation | undefined, now: WireConversation): void {
    if (this.thread.value.id.value === now.id) this.profile.take(before, now);
    this.warmth.soon();
  }

  private deletedElsewhere(id: string): void {
    this.threads.delete(id);
    if (this.thread.value.id.value !== id) return;
    this.newConversation();
    toast("This conversation was deleted elsewhere.");
  }

  /** The connection is back. */
  private recover(): void {
    void this.conversations.refresh().then(() => this.warmth.soon());
    this.lanes.recover();
  }

  private newKey(kind: string): string {
    return `${kind}-${Date.now().toString(36)}-${++this.count}`;
  }
}
