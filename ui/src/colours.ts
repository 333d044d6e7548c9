// Colours of data. Blue and orange stay apart for all common kinds of colour blindness; brightness differs, too.

export type Theme = "light" | "dark";

type Rgb = [number, number, number];

interface Palette {
  neutral: Rgb;
  low: Rgb;
  high: Rgb;
  surprise: Rgb;
  tints: Rgb[];
  lines: string[];
}

// Backgrounds of text keep a contrast of at least 4.5 : 1 to the colour of the text.
const PALETTES: Record<Theme, Palette> = {
  light: {
    neutral: [255, 255, 255],
    low: [112, 174, 226],
    high: [246, 164, 84],
    surprise: [235, 150, 60],
    tints: [
      [198, 223, 243], [250, 214, 165], [196, 231, 214], [240, 205, 224], [247, 240, 170], [214, 210, 240], [214, 218, 220], [248, 203, 185],
    ],
    lines: ["#0a6c8f", "#c25700", "#2a8a63", "#a03a78", "#8a7400", "#5a54b8", "#5c666d", "#b23a2e"],
  },
  dark: {
    neutral: [24, 29, 32],
    low: [30, 92, 145],
    high: [140, 76, 14],
    surprise: [146, 80, 14],
    tints: [
      [32, 73, 105], [107, 66, 20], [28, 84, 61], [97, 44, 76], [84, 77, 22], [66, 60, 118], [62, 70, 75], [108, 48, 38],
    ],
    lines: ["#5fb9dc", "#f0a35e", "#66c79c", "#df8fbd", "#d8c34a", "#a5a0f0", "#a9b4bb", "#f08c7d"],
  },
};

function mix(from: Rgb, to: Rgb, share: number): string {
  const part = Math.min(1, Math.max(0, share));
  const [r, g, b] = from.map((value, at) => Math.round(value + ((to[at] ?? 0) - value) * part));
  return `rgb(${r},${g},${b})`;
}

/** From no colour at 0 to the full one at `most`: how surprising a token was. */
export function sequential(theme: Theme, value: number, most: number): string {
  const palette = PALETTES[theme];
  return mix(palette.neutral, palette.surprise, Math.sqrt(Math.abs(value) / (most || 1)));
}

/** Blue below zero, orange above. */
export function diverging(theme: Theme, value: number, most: number): string {
  const palette = PALETTES[theme];
  return mix(palette.neutral, value < 0 ? palette.low : palette.high, Math.sqrt(Math.abs(value) / (most || 1)));
}

export function tint(theme: Theme, at: number): string {
  const { tints } = PALETTES[theme];
  const [r, g, b] = tints[((at % tints.length) + tints.length) % tints.length] ?? [128, 128, 128];
  return `rgb(${r},${g},${b})`;
}

export function line(theme: Theme, at: number): string {
  const { lines } = PALETTES[theme];
  return lines[at % lines.length] ?? "#888888";
}

export function faint(colour: string, share: number): string {
  return `color-mix(in srgb, ${colour} ${Math.round(share * 100)}%, transparent)`;
}
