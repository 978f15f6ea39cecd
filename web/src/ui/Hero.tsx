// The idea of the whole page as a drawing: a prompt that is read once, and answers that fork off it.
const DIAGRAM_CELL = { width: 9, height: 18, step: 13 };
const TRUNK_CELLS = 7; // cells of the prompt
const ANSWER_CELLS = [4, 6, 5]; // new cells of each answer
const ROW_Y = [13, 46, 79];
const FORK_X = TRUNK_CELLS * DIAGRAM_CELL.step;
const ANSWER_X = FORK_X + 40;

export function ForkDiagram() {
  const trunk = ROW_Y[1]!;
  return (
    <svg class="hero" viewBox="0 0 226 108" role="img" aria-label="One prompt, read once; three answers that share its pages">
      {ROW_Y.map((y) => (
        <path key={y} class="hero-line" pathLength="1" d={`M${FORK_X} ${trunk}c20 0 16 ${y - trunk} 36 ${y - trunk}`} />
      ))}
      {Array.from({ length: TRUNK_CELLS }, (_, index) => (
        <rect key={index} class={`hero-cell hero-${index}`} x={index * DIAGRAM_CELL.step} y={trunk - 9} width={DIAGRAM_CELL.width} height={DIAGRAM_CELL.height} rx="2.5" />
      ))}
      {ANSWER_CELLS.map((count, row) =>
        Array.from({ length: count }, (_, index) => (
          <rect
            key={`${row} ${index}`}
            class={`hero-cell hero-new hero-${TRUNK_CELLS + 2 * index + row}`}
            x={ANSWER_X + index * DIAGRAM_CELL.step + 0.75}
            y={ROW_Y[row]! - 8.25}
            width={DIAGRAM_CELL.width - 1.5}
            height={DIAGRAM_CELL.height - 1.5}
            rx="2"
          />
        )),
      )}
    </svg>
  );
}
