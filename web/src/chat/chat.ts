// User actions: send, stop, regenerate, edit, pick, switch, open. Each one changes a thread and sends requests.

import { computed, effect, signal, untracked } from "@preact/signals";
import type { ServerFrame, Session, WireConversation } from "../api/frames";
import { Socket, socketUrl } from "../api/socket";
import { announce, toast } from "../app/notifications";
import { hasDefaults, type Sampling, sampling, shouldAutoTitle, systemPrompt } from "../app/settings";
import { AutoTitler } from "../conversations/autoTitle";
import { Conversations } from "../conversations/conversations";
import { currentSettings, SettingsSync } from "../conversations/metadata";
import { Search } from "../conversations/search";
import { Auth, resetPage } from "../server/auth";
import { CacheCoverageWatch } from "../server/cacheCoverage";
import { ReadinessPoller } from "../server/readiness";
import { type Attachment, Attachments, joinMessage } from "./attachments";
import { ConversationLoader } from "./conversationLoader";
import { LiveSync } from "./liveSync";
import { MessageEdits } from "./messageEdits";
import { PrefillAhead } from "./prefillAhead";
import { type AnswerOptions, continuationAfter, createFrame } from "./request";
import { describeEnding, type ResponseStream, ResponseStreams } from "./responseStreams";
import { type QueuedMessage, Thread } from "./thread";
import { TokenForks } from "./tokenFork";
import { ToolServers } from "./toolServers";
import type { Message } from "./tree";
import { type ForkStart, Turn } from "./turn";
import { composeMessage, UnsentMessages } from "./unsent";

// Parameters named by the error for a stop or drop request that arrived after the end of the response: not shown.
const LATE_REQUEST_PARAMS = new Set(["response_id", "candidate"]);

const ONE_ANSWER: Partial<Sampling> = { n: 1, search: "sample" };

export class Chat {
  readonly conversations = new Conversations((head) => this.threads.get(head.id)?.recordOwnChange(head));
  readonly search = new Search();
  readonly cacheCoverage = new CacheCoverageWatch(() => this.conversations.shown.peek().map(({ id }) => id));
  readonly readiness = new ReadinessPoller();
  readonly session = signal<Session | null>(null);
  private unstarted = new Thread();
  readonly thread = signal(this.unstarted);
  readonly socket: Socket;
  readonly live = computed(() => this.thread.value.live.value);
  readonly ready = computed(() => {
    const blocked = ["loading", "unavailable"].includes(this.readiness.status.value.phase);
    return this.socket.state.value === "open" && this.thread.value.state.value === "ready" && !blocked;
  });
  readonly attachments: Attachments;
  /** Number of tokens that a prompt may have; 0: unknown. */
  readonly maxTokens = computed(() => this.session.value?.max_model_len ?? this.readiness.contextTokens.value);
  readonly prefill: PrefillAhead;
  readonly unsent: UnsentMessages;
  readonly forks = new TokenForks(this);
  readonly toolServers = new ToolServers();
  readonly autoTitler = new AutoTitler(this.conversations);
  private readonly threads = new Map<string, Thread>();
  private readonly startedHere = new Set<string>(); // started on this page, before their first update from the server
  readonly loader = new ConversationLoader(this.conversations);
  readonly edits = new MessageEdits(this.thread, this.conversations, this.loader);
  private readonly settingsSync = new SettingsSync(this.conversations);
  readonly auth: Auth;
  private readonly streams: ResponseStreams;
  private readonly liveSync: LiveSync;
  private count = 0;

  constructor(url = socketUrl(), reset = resetPage) {
    this.socket = new Socket(url, (frame) => this.receive(frame));
    this.streams = new ResponseStreams(this.socket, this.loader, {
      created: (stream, conversation) => this.onCreated(stream, conversation),
      ended: (stream) => this.onEnded(stream),
    });
    const next = () => continuationAfter(this.thread.value, this.thread.value.tree.value.leaf.value?.key ?? null);
    const afterTools = () => ({ ...next(), ...this.toolServers.fieldsOf(sampling.value.toolServers) });
    const target = () => (this.ready.value && !this.live.value ? afterTools() : null);
    const afterPrompt = () => ({
      ...afterTools(),
      ...(systemPrompt.peek() ? { instructions: systemPrompt.peek() } : {}),
    });
    this.attachments = new Attachments(this.thread, afterPrompt, () => this.maxTokens.value);
    this.prefill = new PrefillAhead(target, (frame) => this.socket.send(frame), this.attachments.ready);
    // not while it is asked whether it is ready: after a lost connection it may be another process, which is loading
    const isReady = computed(() => this.socket.state.value === "open" && !this.readiness.isPolling.value);
    this.unsent = new UnsentMessages(this.thread, this.prefill.text, this.attachments, isReady, (thread, message) =>
      this.sendIn(thread, message),
    );
    this.liveSync = new LiveSync(this.socket, this.conversations, this.loader, this.streams, {
      shown: () => this.thread.peek(),
      changed: (before, now) => this.onRemoteChange(before, now),
      deleted: (id) => this.onRemoteDelete(id),
    });
    this.socket.opened.subscribe((times) => {
      this.prefill.reset();
      if (times === 0) return;
      void this.readiness.pollUntilReady();
      this.liveSync.subscribe();
      if (times > 1 || this.conversations.wasUnreachable) this.onReconnected();
    });
    this.auth = new Auth(this.socket, this.conversations, reset);
    effect(() => {
      void [systemPrompt.value, sampling.value];
      const thread = this.thread.peek();
      if (thread.state.peek() === "ready") untracked(() => this.settingsSync.scheduleSave(thread.id.value));
    });
  }

  /** Connect and load the list; the page is locked if the server requires a key. */
  async start(): Promise<void> {
    if (await this.auth.connect()) this.cacheCoverage.scheduleRefresh();
  }

  /** Sign in with an API key. */
  async signIn(key: string): Promise<void> {
    if (!(await this.auth.signIn(key))) return;
    const id = this.thread.value.id.value;
    if (id !== null) await this.open(id);
  }

  // -- user actions

  /**
   * Send a message after the shown leaf. A running answer stops and keeps what it has computed. `only` overrides the
   * sampling of this turn.
   */
  send(text: string, only: Partial<Sampling> = {}, files: readonly Attachment[] = []): void {
    const thread = this.thread.value;
    if (thread.state.value !== "ready") return;
    const message = composeMessage(text, files, only);
    const turn = thread.live.value;
    if (turn) {
      thread.queued.value = [message, ...thread.queued.value];
      turn.isSteered = true;
      this.streams.stop(turn);
    } else this.sendIn(thread, message);
  }

  private sendIn(thread: Thread, { text: written, files, settings, instructions }: QueuedMessage): void {
    const text = joinMessage(files, written);
    const tree = thread.tree.value;
    const leaf = tree.leaf.value;
    const turn = leaf ? thread.turnOf(leaf) : undefined;
    if (turn) turn.showsCandidates.value = false; // continuing counts as picking the shown candidate
    for (const run of leaf?.callRuns.value.values() ?? []) if (run.phase === "running") run.stop();
    thread.compared.value = null;
    thread.refusal.value = "";
    const user = tree.add({ key: this.newKey("user"), parent: leaf?.key ?? null, role: "user", text });
    this.attachments.markSent(user, files);
    thread.suggestions.value = thread.suggestions.value.filter((suggestion) => suggestion !== written);
    this.generate(thread, user, settings, { instructions });
  }

  /** Generate another answer to the same message; the old one stays as a sibling. */
  regenerate(answer: Message): void {
    const above = this.thread.value.tree.value.get(answer.parent ?? "");
    const outputs = answer.callOutputs.value;
    if (above?.role === "user") this.answer(above);
    else if (above && outputs.length > 0) this.answer(above, ONE_ANSWER, { outputs });
  }

  /** Generate an answer that begins with a text, as a sibling of the others. */
  answerFrom(user: Message, text: string): void {
    this.answer(user, ONE_ANSWER, { text });
  }

  /** Generate an answer to a message, as a sibling of the others. */
  answer(above: Message, only: Partial<Sampling> = {}, options: AnswerOptions = {}): void {
    if (!this.thread.value.live.value) this.generate(this.thread.value, above, only, options);
  }

  /** Generate one more answer to the same message with other settings, and show both side by side. */
  compareSettings(answer: Message, settings: Partial<Sampling>, options: AnswerOptions): void {
    const thread = this.thread.value;
    const user = thread.questionOf(answer);
    if (!user || thread.live.value) return;
    this.generate(thread, user, { ...ONE_ANSWER, ...settings }, options);
    thread.compared.value = [answer, thread.tree.value.leaf.value!];
  }

  /** Send a changed message as a sibling of the old one. */
  edit(message: Message, text: string): void {
    const thread = this.thread.value;
    if (thread.live.value) return;
    const tree = thread.tree.value;
    const edited = tree.add({ key: this.newKey("user"), parent: message.parent, role: "user", text });
    this.unsent.drafts.trackEdit(thread, edited, message);
    this.generate(thread, edited);
  }

  /** Generate a sibling of an answer that starts with its first tokens. */
  forkAtToken(answer: Message, start: ForkStart): void {
    const user = this.thread.value.questionOf(answer);
    if (user) this.answer(user, ONE_ANSWER, { start });
  }

  stop(): void {
    const turn = this.live.value;
    if (turn) this.streams.stop(turn);
  }

  /** Pick one of the answers that are shown side by side. The others stay as its siblings. */
  pick(message: Message): void {
    const thread = this.thread.value;
    const turn = thread.turnOf(message);
    const shown = thread.comparedWith(message) ?? turn?.candidates ?? [message];
    if (turn) turn.showsCandidates.value = false;
    thread.compared.value = null;
    announce(`Picked answer ${shown.indexOf(message) + 1}.`);
    this.choose(message);
  }

  /** Stop one candidate while the others continue; its KV pages are freed immediately. */
  drop(message: Message): void {
    const thread = this.thread.value;
    const turn = thread.turnOf(message);
    if (!turn?.canDrop(message)) return;
    this.streams.drop(turn, message);
    const other = turn.candidates.find((each) => each !== message && turn.canDrop(each));
    if (other && thread.tree.value.path.value.includes(message)) thread.tree.value.choose(other);
    announce(`Dropped answer ${turn.candidates.indexOf(message) + 1}.`);
  }

  choose(message: Message): void {
    const thread = this.thread.value;
    thread.tree.value.choose(message);
    void this.loader.saveActiveLeaf(thread);
  }

  newConversation(): void {
    this.unsent.takeBackFailed(this.unstarted);
    const { id, tree, attachments, settings } = this.unstarted;
    const isStarted = id.value !== null || tree.value.size > 0;
    this.unstarted = isStarted ? new Thread() : new Thread(attachments);
    this.show(this.unstarted);
    this.settingsSync.applyNew(isStarted ? null : settings);
  }

  /** Show a thread. A new conversation keeps its settings when it is left before the server has created it. */
  private show(thread: Thread): void {
    const left = this.thread.value;
    left.settings = left.tree.value.size > 0 || !hasDefaults() ? currentSettings() : null;
    this.thread.value = thread;
  }

  async open(id: string): Promise<void> {
    void this.settingsSync.flush();
    const thread = this.threads.get(id) ?? new Thread();
    thread.id.value = id;
    this.threads.set(id, thread);
    this.show(thread);
    this.conversations.markSeen(id);
    this.settingsSync.apply(this.conversations.find(id));
    if (thread.state.value !== "ready" || !thread.isLoaded) {
      const head = await this.loader.load(thread, id);
      if (head && this.thread.value === thread) this.settingsSync.apply(head);
    }
    await this.liveSync.refreshThread(thread);
  }

  remove(id: string, onUndone: () => void = () => {}): void {
    const isShown = this.thread.value.id.value === id;
    this.conversations.remove(id, () => {
      if (isShown) void this.open(id);
      onUndone();
    });
    if (isShown) this.newConversation();
  }

  isLive(id: string): boolean {
    return this.conversations.runningIn(id).length > 0 || (this.threads.get(id)?.live.value ?? null) !== null;
  }

  // -- requests and events

  /** Generate answers to a message; with `options.outputs`, to an answer that called functions. */
  generate(thread: Thread, above: Message, only: Partial<Sampling> = {}, options: AnswerOptions = {}): void {
    const tree = thread.tree.value;
    const key = this.newKey("turn");
    const settings = { ...sampling.value, ...only };
    const candidates = Array.from({ length: settings.n }, (_, index) =>
      tree.add(
        { key: `${key}-${index}`, parent: above.key, role: "assistant", turn: key, status: "waiting" },
        index === 0,
      ),
    );
    const turn = new Turn(key, candidates, settings.search === "beam", options.start);
    const { outputs = [], instructions = systemPrompt.value } = options;
    for (const candidate of candidates) candidate.callOutputs.value = outputs;
    turn.sent = { settings, instructions };
    const send = () => {
      const tools = this.toolServers.fieldsOf(settings.toolServers);
      const frame = createFrame(thread, above, key, settings, { ...options, instructions }, tools);
      this.streams.start(thread, turn, above, frame, this.session.value?.limits.max_frame_bytes);
    };
    const waits = [
      this.edits.flush(),
      this.toolServers.prepare(settings.toolServers),
      this.loader.loadId(thread, tree.get(above.parent ?? "")),
    ].filter((wait) => wait !== null);
    if (waits.length === 0) send();
    else {
      thread.addTurn(turn);
      void Promise.all(waits).then(send);
    }
  }

  private receive(frame: ServerFrame): void {
    if (frame.type === "session.created") this.session.value = frame.session;
    if (frame.type === "prompt.prewarmed") this.prefill.receive(frame);
    if (frame.type === "error" && frame.status === 503) void this.readiness.pollUntilReady();
    if (frame.type === "conversation.updated" && !frame.running) this.onOwnUpdate(frame.conversation);
    this.liveSync.receive(frame);
    if (this.streams.receive(frame)) return;
    if (frame.type !== "error" || LATE_REQUEST_PARAMS.has(frame.error.param ?? "") || this.prefill.handleError())
      return;
    toast(frame.error.message);
  }

  private onCreated({ thread }: ResponseStream, conversation: string | null): void {
    if (thread.id.value === null && conversation !== null) {
      thread.id.value = conversation;
      thread.isLoaded = true;
      this.threads.set(conversation, thread);
      this.startedHere.add(conversation);
    }
    if (thread === this.thread.value) void this.liveSync.syncThread(thread);
  }

  /** A response created by this page changed its conversation. */
  private onOwnUpdate(head: WireConversation): void {
    this.conversations.applyOwnChange(head);
    const thread = this.threads.get(head.id);
    if (!thread || !this.startedHere.delete(head.id)) return;
    this.autoTitler.onStarted(head);
    this.settingsSync.attach(head.id, thread === this.thread.value ? null : thread.settings);
  }

  private onEnded({ thread, turn, above }: ResponseStream): void {
    const id = thread.id.value;
    const isShown = thread === this.thread.value;
    if (turn.isSteered) turn.markSteered();
    this.unsent.drafts.saveSoon();
    if (turn.isTooLong && above) this.unsent.takeBack(thread, above, turn.candidates[0]!.error.value);
    for (const answer of turn.candidates) void this.loader.loadId(thread, answer);
    void this.afterTurn(thread, turn);
    const calling = turn.callingAnswer;
    if (calling) void import("./toolLoop").then(({ startCalls }) => startCalls(this, thread, calling));
    else if (!turn.failed && (turn.isSteered || !turn.stopRequested)) this.unsent.sendFirstWhenReady(thread);
    if (turn.failed) void this.readiness.pollUntilReady(); // the model may have failed
    if (turn.failed && isShown) void this.liveSync.syncThread(thread);
    if (id === null) {
      announce(describeEnding(turn));
      return;
    }
    const title = this.conversations.find(id)?.title ?? "another conversation";
    announce(isShown ? describeEnding(turn) : `${describeEnding(turn)} It is in ${title}.`);
    if (!isShown) this.conversations.markUnseen(id);
    this.conversations.setRunning(
      id,
      this.conversations.runningIn(id).filter((other) => other !== turn.responseId.value),
    );
    this.cacheCoverage.scheduleRefresh();
  }

  /** Store what follows from a turn. Sequential, because each step is a revision of the conversation. */
  private async afterTurn(thread: Thread, turn: Turn): Promise<void> {
    if (turn.candidates.indexOf(thread.tree.value.leaf.value!) > 0) await this.loader.saveActiveLeaf(thread);
    await this.settingsSync.flush();
    // false if the turn was stopped before the first token
    const hasText = !turn.failed && turn.candidates.some((message) => message.text.value !== "");
    if (shouldAutoTitle(this.session.value?.model) && hasText && thread.id.value !== null)
      await this.autoTitler.onAnswered(thread.id.value);
    void this.loader.updateCopy(thread);
  }

  private onRemoteChange(before: WireConversation | undefined, now: WireConversation): void {
    if (this.thread.value.id.value === now.id) this.settingsSync.applyRemote(before, now);
    this.cacheCoverage.scheduleRefresh();
  }

  private onRemoteDelete(id: string): void {
    this.threads.delete(id);
    if (this.thread.value.id.value !== id) return;
    this.newConversation();
    toast("This conversation was deleted elsewhere.");
  }

  /** The connection was restored. */
  private onReconnected(): void {
    void this.conversations.refresh().then(() => this.cacheCoverage.scheduleRefresh());
    this.streams.recover();
  }

  private newKey(kind: string): string {
    return `${kind}-${Date.now().toString(36)}-${++this.count}`;
  }
}
