// What all parts of the page share: the data, the words, the colours, what is selected and filtered.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Calls, Page } from "./data.ts";
import type { Query } from "./filter.ts";
import type { RowSource } from "./rows.ts";
import type { Language, Say } from "./words.ts";

export interface Shared {
  page: Page;
  calls: Calls | null;
  rows: RowSource | null;
  language: Language;
  t: Say;
  dark: boolean;
  query: Query;
  setQuery: (change: Partial<Query>) => void;
  selected: number; // a call; -1 for none
  slot: string;
  select: (call: number, slot?: string) => void;
  rank: number; // the rank of the chart
  setRank: (rank: number) => void;
}

export const State = createContext<Shared>(null!);
export const useShared = (): Shared => useContext(State);

/** Colours of the theme, for canvases: from the custom properties of the document. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Note when the page first showed everything, in milliseconds: what the tests wait for. */
export function markReady(): void {
  document.documentElement.dataset.ready ??= String(Math.round(performance.now()));
}

export const statusColour = (status: string): string => `var(--s-${status}, var(--s-unmeasured))`;
