// @vitest-environment jsdom
import { h, render } from "preact";
import { afterEach, expect, it, vi } from "vitest";
import { Chat } from "../src/chat/chat";
import { ChatContext } from "../src/ui/context";
import { FakeSocket, fakeNetwork } from "./fakes";

afterEach(() => {
  render(null, document.body);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

it("the dot at the name of the model says what its colour means", async () => {
  fakeNetwork();
  vi.stubGlobal("matchMedia", () => ({ matches: false, addEventListener: () => {} }));
  const { Sidebar } = await import("../src/ui/sidebar/Sidebar");
  const chat = new Chat("ws://test/v1/responses");
  render(h(ChatContext.Provider, { value: chat }, h(Sidebar, {})), document.body);
  const dot = () => {
    const { className, title, ariaLabel } = document.querySelector<HTMLElement>(".model-status .dot")!;
    return [className, title, ariaLabel];
  };
  expect(dot()).toEqual(["dot dot-off", "No connection to the server", "No connection to the server"]);
  chat.socket.connect();
  FakeSocket.last.open();
  await vi.advanceTimersByTimeAsync(50);
  expect(dot()).toEqual(["dot dot-on", "Connected to the server", "Connected to the server"]);
});
