export interface DiffPiece {
  text: string;
  /** Whether this piece is missing in the other text. */
  differs: boolean;
}

const MAX_WORDS = 2000;

/** Splits `text` into pieces; those outside the longest common subsequence of words with `base` are marked. Text after `MAX_WORDS` words is one piece. */
export function wordDiff(base: string, text: string): DiffPiece[] {
  const from = words(base);
  const to = words(text);
  const kept = commonIndexes(from, to);
  const pieces: DiffPiece[] = [];
  to.forEach((word, index) => {
    const differs = !kept.has(index);
    const last = pieces.at(-1);
    if (last && last.differs === differs) last.text += word;
    else pieces.push({ text: word, differs });
  });
  return pieces;
}

function words(text: string): string[] {
  const all = text.split(/(\s+)/);
  const rest = all.slice(MAX_WORDS).join("");
  return rest ? [...all.slice(0, MAX_WORDS), rest] : all;
}

/** Indexes into `to` of a longest common subsequence with `from`. */
function commonIndexes(from: string[], to: string[]): Set<number> {
  const width = to.length + 1;
  const lengths = new Uint16Array((from.length + 1) * width);
  const at = (i: number, j: number): number => lengths[i * width + j] ?? 0;
  for (let i = from.length - 1; i >= 0; i -= 1) {
    for (let j = to.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = from[i] === to[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  const kept = new Set<number>();
  let i = 0;
  let j = 0;
  while (i < from.length && j < to.length) {
    if (from[i] === to[j]) {
      kept.add(j);
      i += 1;
      j += 1;
    } else if (at(i + 1, j) >= at(i, j + 1)) i += 1;
    else j += 1;
  }
  return kept;
}
