// Both tensors of a call and their difference: heat maps with a common cursor, histograms, profiles, the worst elements.
import { useEffect, useMemo, useState } from "preact/hooks";
import { real, wordAt, type Histogram, type Picture, type Profile, type TensorDiff } from "./data.ts";
import { count, error, value } from "./format.ts";
import { cellRange, unfold } from "./heat.ts";
import { HeatMap } from "./heatmap.tsx";
import { decodeNumbers, inflate } from "./packing.ts";
import { ask } from "./rows.ts";
import { useShared } from "./state.tsx";
import { Copy } from "./verdict.tsx";
import { findEvidence } from "./why.tsx";
import { patternZh } from "./words.ts";

interface Shown { tensor: TensorDiff; words: string }

/** The tensors of the selected call: from the page, or from the server. */
function useTensors(): { shown: Shown[]; busy: boolean; problem: string } {
  const { page, calls, selected, slot } = useShared();
  const [fetched, setFetched] = useState<{ key: string; shown: Shown[]; problem: string } | null>(null);
  const place = selected >= 0 && calls ? ([calls.step[selected], calls.rank[selected], calls.index[selected]] as const) : null;
  const at = place ? findEvidence(page.evidence, place) : -1;
  const kept = useMemo(() => (at < 0 ? [] : page.evidence[at].tensors.map((tensor, number) => ({ tensor, words: page.pattern_words[at]?.[number] ?? "" }))), [at]);
  const key = place ? `${place.join()} ${slot}` : "";
  const inPage = kept.some(({ tensor }) => tensor.slot === slot) || (kept.length > 0 && !slot);
  useEffect(() => {
    if (!page.server || !place || inPage) return;
    let current = true;
    ask<{ tensor: TensorDiff; words: string }>("tensor", { place: place.join(), slot })
      .then((found) => current && setFetched({ key, shown: [found], problem: "" }))
      .catch((failure: Error) => current && setFetched({ key, shown: [], problem: failure.message }));
    return () => { current = false; };
  }, [key, inPage]);
  if (!page.server || inPage) return { shown: kept, busy: false, problem: "" };
  const mine = fetched?.key === key ? fetched : null;
  return { shown: mine?.shown.length ? [...mine.shown, ...kept] : kept, busy: mine === null, problem: mine?.problem ?? "" };
}

export function Tensors() {
  const { page, calls, t, selected, slot, select } = useShared();
  const { shown, busy, problem } = useTensors();
  if (selected < 0 || !calls) return null;
  const wanted = Math.max(0, shown.findIndex(({ tensor }) => tensor.slot === slot));
  const { tensor, words } = shown[wanted] ?? {};
  const command = page.sides.length === 2 && page.source ? `tensorprobe diff ${page.sides.map((side) => quote(side.path)).join(" ")} ${quote(wordAt(calls.name, selected))} --step ${calls.step[selected]} --rank ${calls.rank[selected]}` : "";
  return (
    <div class="tensors" id="tensors">
      <header class="row">
        <h3>{t("tensors")}</h3>
        {shown.length > 1 && shown.map(({ tensor: each }, at) => (
          <button type="button" class="chip" aria-pressed={at === wanted} onClick={() => select(selected, each.slot)}><span class="name">{each.slot}</span></button>
        ))}
        {tensor && <span class="muted small name">{tensor.slot} · {tensor.dtypes[0]}{tensor.dtypes[1] !== tensor.dtypes[0] && ` → ${tensor.dtypes[1]}`} [{tensor.shapes[0].join(", ")}]</span>}
      </header>
      {busy && <p class="muted">{t("loading")}</p>}
      {problem && <p class="muted">{problem}</p>}
      {!tensor && !busy && page.kind === "compare" && !page.server && (
        <div class="muted"><p>{t("no_tensors")} {t("no_tensors_hint")}</p>{command && <Copy text={command} label={t("cmd.look")} />}</div>
      )}
      {tensor && <Tensor key={`${selected} ${tensor.slot}`} tensor={tensor} words={words} />}
    </div>
  );
}

const quote = (text: string): string => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`);

function Tensor({ tensor, words }: { tensor: TensorDiff; words: string }) {
  const { t, language, page } = useShared();
  const sentence = language === "zh" && tensor.pattern ? patternZh(tensor.pattern) : words;
  return (
    <>
      {sentence && <p class="pattern"><span class="label">{t("pattern")}</span> {sentence}</p>}
      {tensor.problem && <p class="muted">{tensor.problem}</p>}
      {tensor.pictures.length > 0 && <Pictures tensor={tensor} live={page.server} />}
      <div class="plots">
        {tensor.profiles.map((profile) => <Along profile={profile} />)}
        {tensor.values && <Bars title={t("values_of")} histogram={tensor.values} names={["baseline", "candidate"]} />}
        {tensor.differences && <Bars title={t("differences_of")} histogram={tensor.differences} names={["difference"]} />}
        {tensor.ulps && <Bars title={t("ulps_of")} histogram={tensor.ulps} names={["ulp"]} />}
      </div>
      {tensor.worst.length > 0 && <WorstElements tensor={tensor} />}
    </>
  );
}

const PLANES = ["baseline", "candidate", "difference"] as const;

function Pictures({ tensor, live }: { tensor: TensorDiff; live: boolean }) {
  const { t } = useShared();
  const [own, setOwn] = useState<Picture | null>(null);
  const [chosen, setChosen] = useState(tensor.pictures.length - 1);
  const picture = own ?? tensor.pictures[chosen];
  const [planes, setPlanes] = useState<Float64Array[] | null>(null);
  const [cursor, setCursor] = useState<[number, number] | null>(null);
  useEffect(() => {
    let current = true;
    void Promise.all(picture.planes.map(async (text) => decodeNumbers(await inflate(text)))).then((read) => current && setPlanes(read));
    return () => { current = false; };
  }, [picture]);
  const shape = tensor.shapes[0];
  return (
    <div class="pictures">
      <header class="row small">
        {tensor.pictures.length > 1 && tensor.pictures.map((each, at) => (
          <button type="button" class="chip" aria-pressed={own === null && at === chosen} onClick={() => { setOwn(null); setChosen(at); }}>{at ? <span class="name">{each.title}</span> : t("whole")}</button>
        ))}
        {live && shape.length > 2 && <Slices tensor={tensor} show={setOwn} shown={picture} />}
      </header>
      {planes && planes[0].length === picture.rows * picture.columns && (
        <>
          <div class="maps">
            {PLANES.map((name, at) => <HeatMap name={name} picture={picture} planes={planes} plane={at} cursor={cursor} setCursor={setCursor} />)}
          </div>
          <p class="readout" aria-live="polite">{cursor ? <Readout picture={picture} planes={planes} cursor={cursor} shape={shape} /> : <span class="muted">{t("hover_cell")}</span>}</p>
          {picture.row_block * picture.column_block > 1 && <p class="small muted">{t("cells")} {picture.row_block} × {picture.column_block} {t("elements")}.</p>}
        </>
      )}
    </div>
  );
}

/** Inputs for the indices of the leading axes; the server makes the picture of that slice. */
function Slices({ tensor, show, shown }: { tensor: TensorDiff; show: (picture: Picture) => void; shown: Picture }) {
  const { t, calls, selected } = useShared();
  const shape = tensor.shapes[0];
  const [problem, setProblem] = useState("");
  const fixed = shown.fixed.length ? shown.fixed : shape.slice(0, -2).map(() => 0);
  const change = (axis: number, to: number): void => {
    const at = fixed.map((each, held) => (held === axis ? Math.min(shape[axis] - 1, Math.max(0, to)) : each));
    const place = [calls!.step[selected], calls!.rank[selected], calls!.index[selected]].join();
    ask<Picture>("picture", { place, slot: tensor.slot, fixed: at.join() }).then((picture) => { setProblem(""); show(picture); }).catch((failure: Error) => setProblem(failure.message));
  };
  return (
    <span class="slices">{t("slice")} [{fixed.map((at, axis) => (
      <input type="number" min={0} max={shape[axis] - 1} value={at} aria-label={`${t("slice")} ${axis}`} onChange={(event) => change(axis, Number(event.currentTarget.value))} />
    ))}:, :] {problem}</span>
  );
}

function Readout({ picture, planes, cursor, shape }: { picture: Picture; planes: Float64Array[]; cursor: [number, number]; shape: number[] }) {
  const { t } = useShared();
  const [row, column] = cursor;
  const at = row * picture.columns + column;
  const rows = cellRange(row, picture.row_block, picture.height), columns = cellRange(column, picture.column_block, picture.width);
  const sizes = picture.row_axes.map((axis) => shape[axis]);
  const folded = shape.length === 1 && picture.height > 1;
  const span = ([low, high]: [number, number]): string => (low === high ? String(low) : `${low}–${high}`);
  let where: string;
  if (folded) where = span([rows[0] * picture.width + columns[0], Math.min(shape[0] - 1, rows[1] * picture.width + columns[1])]);
  else {
    const [low, high] = [unfold(rows[0], sizes), unfold(rows[1], sizes)];
    where = [...picture.fixed, ...low.map((each, axis) => span([Math.min(each, high[axis]), Math.max(each, high[axis])])), span(columns)].join(", ");
  }
  return <span class="name">[{where}]  {t("baseline")} <b>{value(planes[0][at])}</b>  {t("candidate")} <b>{value(planes[1][at])}</b>  Δ <b>{error(planes[2][at])}</b></span>;
}

const SIZE = { width: 280, height: 84 };
const short = (given: number): string => String(Number(given.toPrecision(3)));

function Bars({ title, histogram, names }: { title: string; histogram: Histogram; names: string[] }) {
  const { t } = useShared();
  const columns = names.map((name) => histogram.counts[name] ?? []);
  const length = columns[0].length;
  const top = Math.max(1, ...columns.flat());
  const step = SIZE.width / length;
  const high = (held: number): number => (held ? Math.max(2, (Math.log1p(held) / Math.log1p(top)) * SIZE.height) : 0);
  const edges = histogram.edges.map(real);
  const last = edges.filter(Number.isFinite).at(-1)!;
  return (
    <figure class="bars">
      <figcaption>{title}{histogram.sampled > 0 && <span class="muted"> · {count(histogram.sampled)} {t("sampled")}</span>}
        {names.length > 1 && <span class="muted"> <i class="swatch one" />{t("baseline")} <i class="swatch two" />{t("candidate")}</span>}</figcaption>
      <svg viewBox={`0 0 ${SIZE.width} ${SIZE.height}`} preserveAspectRatio="none" role="img" aria-label={title}>
        {columns.map((held, side) => held.map((each, at) => each > 0 && (
          <rect class={names.length > 1 ? (side ? "two" : "one") : "one"} x={at * step + (names.length > 1 ? (side * step) / 2 : 0)} width={Math.max(1, step / names.length - 0.6)} y={SIZE.height - high(each)} height={high(each)}>
            <title>{`${error(edges[at])} … ${error(edges[at + 1])}: ${count(each)}`}</title>
          </rect>
        )))}
      </svg>
      <div class="ends"><span>{short(edges[0])}</span>{names[0] === "difference" && <span>0</span>}<span>{short(last)}</span></div>
    </figure>
  );
}

function Along({ profile }: { profile: Profile }) {
  const { t } = useShared();
  const values = profile.greatest.map(real);
  const top = Math.max(...values.filter(Number.isFinite), 0);
  const step = SIZE.width / values.length;
  const high = (held: number): number => (held > 0 ? (held === Infinity ? SIZE.height : Math.max(2, (1 + Math.log10(held / top) / 6) * SIZE.height)) : 0);
  const title = `${t("along")} ${profile.axis} (${profile.name})`;
  return (
    <figure class="bars">
      <figcaption>{title} <span class="muted">{error(top)}</span></figcaption>
      <svg viewBox={`0 0 ${SIZE.width} ${SIZE.height}`} preserveAspectRatio="none" role="img" aria-label={title}>
        {values.map((each, at) => each > 0 && (
          <rect class="error" x={at * step} width={Math.max(1, step - 0.6)} y={SIZE.height - high(each)} height={high(each)}>
            <title>{`${at * profile.width}${profile.width > 1 ? `–${Math.min(profile.size, (at + 1) * profile.width) - 1}` : ""}: ${error(each)}, ${count(profile.different[at])}`}</title>
          </rect>
        ))}
      </svg>
      <div class="ends"><span>0</span><span>{profile.size - 1}</span></div>
    </figure>
  );
}

function WorstElements({ tensor }: { tensor: TensorDiff }) {
  const { t } = useShared();
  return (
    <details class="worst">
      <summary>{t("worst_elements")} ({tensor.worst.length})</summary>
      <table>
        <thead><tr><th>{t("index")}</th><th>{t("baseline")}</th><th>{t("candidate")}</th><th>Δ</th><th>ULP</th></tr></thead>
        <tbody>{tensor.worst.map((each) => (
          <tr><td class="name">[{each.index.join(", ")}]</td><td>{value(real(each.baseline))}</td><td>{value(real(each.candidate))}</td><td>{error(real(each.difference))}</td><td>{error(real(each.ulp))}</td></tr>
        ))}</tbody>
      </table>
    </details>
  );
}
