import { expect, it } from "vitest";
import { compareTexts, meanProbability } from "../src/chat/compare";

const marked = (texts: readonly string[]) =>
  compareTexts(texts).rests.map((parts) => parts.map(({ text, differs }) => (differs ? `[${text}]` : text)).join(""));

it("Equal beginnings are taken off, and words that differ from the first text are marked", () => {
  const texts = ["The fox ran far away.", "The fox walked far away.", "The fox ran so far."];
  expect(compareTexts(texts).common).toBe("The fox ");
  expect(marked(texts)).toEqual(["[ran] far away.", "[walked] far away.", "ran [so ]far."]);
});

it("Neighbouring words that differ are one mark, and the parts are the whole text", () => {
  expect(marked(["a red old house", "a big new house"])).toEqual(["[red old] house", "[big new] house"]);
  const { common, rests } = compareTexts(["x y z", "x\n\nq  z!"]);
  expect(rests.map((parts) => common + parts.map(({ text }) => text).join(""))).toEqual(["x y z", "x\n\nq  z!"]);
  expect(marked(["only one"])).toEqual(["only one"]);
  expect(marked(["", "more"])).toEqual(["", "[more]"]);
});

it("Texts too long for a table are marked whole, at once", () => {
  const long = (word: string) => `${word} `.repeat(3000);
  expect(compareTexts([long("a"), long("b")]).rests[1]![0]!.differs).toBe(true);
});

it("Mean probability is geometric", () => {
  expect(meanProbability([Math.log(0.5), Math.log(0.125)])).toBeCloseTo(0.25);
});
