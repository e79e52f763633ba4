// Where in the program the call is, and what it was given.
import { useEffect, useMemo, useState } from "preact/hooks";
import type { Evidence, Frame, Picture } from "./data.ts";
import { HeatMap } from "./heatmap.tsx";
import { decodeNumbers, inflate } from "./packing.ts";
import { useShared } from "./state.tsx";

export function findEvidence(evidence: Evidence[], place: readonly [number, number, number]): number {
  return evidence.findIndex((one) => one.step === place[0] && one.rank === place[1] && one.index === place[2]);
}

export function Why() {
  const { page, t } = useShared();
  const first = page.first;
  const at = first === null ? -1 : findEvidence(page.evidence, [first.step, first.rank, first.index]);
  const shown = page.evidence[at];
  if (first === null || (!shown && !first.source)) return null;
  return (
    <section aria-labelledby="why">
      <h2 id="why">{t("why")}</h2>
      <CallDetail evidence={shown} fallback={first.source} />
    </section>
  );
}

export function CallDetail({ evidence, fallback }: { evidence: Evidence | undefined; fallback?: Frame | null }) {
  const { t, page } = useShared();
  const source = evidence?.source ?? (fallback ? { file: fallback[0], line: fallback[1], function: fallback[2], first: fallback[1], text: [fallback[3]] } : null);
  const glance = evidence?.tensors[0]?.pictures.at(-1);
  return (
    <div class="why">
      {source && source.file ? <Source {...source} /> : !page.source && <p class="muted">{t("no_source")}</p>}
      {evidence && (
        <div class="beside">
          <Stacks stacks={evidence.stacks} />
          <Arguments given={evidence.arguments} />
          {glance && <Glance picture={glance} />}
        </div>
      )}
    </div>
  );
}

/** The difference at a glance; the tensors are shown in full below. */
function Glance({ picture }: { picture: Picture }) {
  const [planes, setPlanes] = useState<Float64Array[] | null>(null);
  useEffect(() => {
    void Promise.all(picture.planes.map(async (text) => decodeNumbers(await inflate(text)))).then(setPlanes);
  }, [picture]);
  return planes && <a class="glance" href="#tensors"><HeatMap name="difference" picture={picture} planes={planes} plane={2} cursor={null} /></a>;
}

function Source({ file, line, first, text, function: name }: NonNullable<Evidence["source"]>) {
  const { t } = useShared();
  return (
    <figure class="source">
      <figcaption><span class="name">{file}:{line}</span> <span class="muted">{name}</span></figcaption>
      <pre aria-label={`${t("source")} ${file}:${line}`}>
        {text.map((code, at) => {
          const here = first + at === line;
          return (
            <div class={here ? "line here" : "line"} aria-current={here ? "true" : undefined}>
              <span class="number">{first + at}</span><code>{code || " "}</code>
            </div>
          );
        })}
      </pre>
    </figure>
  );
}

const shownFrame = ([file, line, name, code]: Frame): string => `${file}:${line} ${name}  ${code}`;

function Stacks({ stacks }: { stacks: Evidence["stacks"] }) {
  const { t } = useShared();
  const [baseline, candidate] = stacks;
  const same = useMemo(() => baseline.map(shownFrame).join("\n") === candidate.map(shownFrame).join("\n"), [stacks]);
  if (!baseline.length && !candidate.length) return null;
  const parts: [string, Frame[]][] = same ? [[`${t("stack")} · ${t("same_stack")}`, candidate]] : [[t("stack_baseline"), baseline], [t("stack_candidate"), candidate]];
  return (
    <>
      {parts.filter(([, frames]) => frames.length).map(([title, frames]) => (
        <details open={frames.length < 5}>
          <summary>{title}</summary>
          <ol class="stack">
            {frames.map(([file, line, name, code]) => (
              <li><span class="name">{file}:{line}</span> <span class="muted">{name}</span><code>{code}</code></li>
            ))}
          </ol>
        </details>
      ))}
    </>
  );
}

function Arguments({ given }: { given: Evidence["arguments"] }) {
  const { t } = useShared();
  const [baseline, candidate] = given;
  if (!baseline && !candidate) return null;
  const same = baseline === candidate;
  return (
    <details open={!same || baseline.length < 200}>
      <summary>{t("arguments_of")}{same && ` · ${t("same_arguments")}`}</summary>
      {same ? <code class="arguments">{baseline}</code> : (
        <dl class="sides">
          <dt>{t("baseline")}</dt><dd><Marked text={baseline} other={candidate} /></dd>
          <dt>{t("candidate")}</dt><dd><Marked text={candidate} other={baseline} /></dd>
        </dl>
      )}
    </details>
  );
}

/** A text with the part marked that the other one does not have: between what both begin and end with. */
function Marked({ text, other }: { text: string; other: string }) {
  let start = 0;
  while (start < text.length && text[start] === other[start]) start++;
  let end = 0;
  while (end < Math.min(text.length, other.length) - start && text.at(-1 - end) === other.at(-1 - end)) end++;
  return <code class="arguments">{text.slice(0, start)}<mark>{text.slice(start, text.length - end)}</mark>{text.slice(text.length - end)}</code>;
}
