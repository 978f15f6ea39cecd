// The idea of the whole page as a drawing: a prompt that is read once, and answers that fork off it.
const CELL = { width: 9, height: 18, step: 13 };
const TRUNK = 7; // cells of the prompt
const LEAVES = [4, 6, 5]; // new cells of each answer
const ROWS = [13, 46, 79];
const FORK_X = TRUNK * CELL.step;
const LEAF_X = FORK_X + 40;

export function Hero() {
  const trunk = ROWS[1]!;
  return (
    <svg class="hero" viewBox="0 0 226 108" role="img" aria-label="One prompt, read once; three answers that share its pages">
      {ROWS.map((y) => (
        <path key={y} class="hero-line" pathLength="1" d={`M${FORK_X} ${trunk}c20 0 16 ${y - trunk} 36 ${y - trunk}`} />
      ))}
      {Array.from({ length: TRUNK }, (_, index) => (
        <rect key={index} class={`hero-cell hero-${index}`} x={index * CELL.step} y={trunk - 9} width={CELL.width} height={CELL.height} rx="2.5" />
      ))}
      {LEAVES.map((count, row) =>
        Array.from({ length: count }, (_, index) => (
          <rect
            key={`${row} ${index}`}
            class={`hero-cell hero-new hero-${TRUNK + 2 * index + row}`}
            x={LEAF_X + index * CELL.step + 0.75}
            y={ROWS[row]! - 8.25}
            width={CELL.width - 1.5}
            height={CELL.height - 1.5}
            rx="2"
          />
        )),
      )}
    </svg>
  );
}
