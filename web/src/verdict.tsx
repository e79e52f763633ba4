// The answer: one word, one sentence, and the facts behind it.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { real, type First, type Tone } from "./data.ts";
import { count, error, times } from "./format.ts";
import { statusColour, useShared } from "./state.tsx";
import { findEvidence } from "./why.tsx";
import { patternZh } from "./words.ts";

export function Copy({ text, label }: { text: string; label: string }) {
  const { t } = useShared();
  const [done, setDone] = useState(false);
  const copy = async (): Promise<void> => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea"); // a page from a file may not use the clipboard everywhere
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return (
    <div class="command">
      <span class="label">{label}</span>
      <code>{text}</code>
      <button type="button" onClick={copy} aria-label={`${t("copy")}: ${text}`}>{done ? t("copied") : t("copy")}</button>
    </div>
  );
}

function Fact({ name, tone, value, children }: { name: string; tone: Tone; value: ComponentChildren; children?: ComponentChildren }) {
  const { t } = useShared();
  return (
    <div class={`fact ${tone}`}>
      <dt>{t(name)}</dt>
      <dd>
        <div class="value">{value}</div>
        <div class="detail">{children}</div>
      </dd>
    </div>
  );
}

export function Verdict() {
  const { page, t } = useShared();
  const { verdict, first } = page;
  return (
    <section class={`verdict ${verdict.tone}`} aria-labelledby="verdict">
      <div class="answer">
        <h1 id="verdict">{t(verdict.headline.replace(/:$/, ""))}</h1>
        {first ? <Place first={first} /> : <p class="sentence">{verdict.sentence}</p>}
      </div>
      {first && <Facts first={first} />}
      {page.before.map((line) => <p class="line warn">{line}</p>)}
      {page.differing.map((line) => <p class="line muted">{line}</p>)}
      <Counts />
      <div class="commands">{page.commands.map(({ key, text }) => <Copy text={text} label={t(`cmd.${key}`)} />)}</div>
    </section>
  );
}

function Place({ first }: { first: First }) {
  const { t } = useShared();
  return (
    <div class="place">
      <p class="call">
        <span class="muted">{t("first_at")}</span> <strong class="name">{first.call}</strong>
        {first.candidate_call && first.candidate_call !== first.call && <span class="muted"> ({t("candidate")}: {first.candidate_call})</span>}
      </p>
      <p class="at">
        {first.module && <span><span class="muted">{t("in_module")}</span> <b class="name">{first.module}</b></span>}
        <span>{t("step")} {first.step}</span>
        <span>{t("rank")} {first.rank}</span>
        {first.slot && <span><span class="name">{first.slot}</span> <span class="muted">{first.dtype} {first.shape}</span></span>}
        {first.source && first.source[0] && <span class="name muted">{first.source[0]}:{first.source[1]}</span>}
      </p>
    </div>
  );
}

function Facts({ first }: { first: First }) {
  const { page, t, language } = useShared();
  const [measured, allowed, largest] = [real(first.measured), real(first.allowed), real(first.max_abs)];
  const ratio = measured / allowed;
  const words = language === "zh" && first.pattern ? patternZh(first.pattern) : first.pattern_words;
  const tensor = page.evidence[findEvidence(page.evidence, [first.step, first.rank, first.index])]?.tensors.find((held) => held.slot === first.slot);
  const looked = Boolean(tensor?.differences);
  const size = Number.isNaN(measured) ? largest : measured;
  return (
    <dl class="facts">
      {first.nonfinite > 0 && <Fact name="error" tone="bad" value={<>{count(first.nonfinite)} <small>{t("nonfinite_places")}</small></>}>{first.place && `@ ${first.place}`}</Fact>}
      {!Number.isNaN(size) && !first.nonfinite && (
        <Fact name="error" tone="bad" value={<>{error(size)} <small>{first.figure || "max |Δ|"}</small></>}>
          {allowed >= 0 && <Beyond ratio={ratio} allowed={allowed} />}
          {first.place && <span> @ {first.place}</span>}
        </Fact>
      )}
      {first.message && <Fact name="error" tone="bad" value={<span class="words">{first.message}</span>} />}
      {first.inputs && (
        <Fact name="inputs" tone={first.inputs === "identical" || first.inputs === "agree" ? "good" : "warn"} value={t(first.inputs)}>
          {t(`inputs_${first.inputs}`)}{real(first.input_error) > 0 && ` (${error(real(first.input_error))})`}
        </Fact>
      )}
      {page.kind === "compare" && <Proof first={first} />}
      {page.kind === "compare" && (
        <Fact name="pattern" tone="quiet" value={<span class="words">{words || (looked ? t("pattern_none") : t("pattern_missing"))}</span>}>{!looked && tensor?.problem}</Fact>
      )}
    </dl>
  );
}

function Beyond({ ratio, allowed }: { ratio: number; allowed: number }) {
  const { t } = useShared();
  if (!(ratio > 1)) return <span>{t("allowed")} {error(allowed)}</span>;
  return <span>{Number.isFinite(ratio) && <b>{times(ratio)} </b>}{t("beyond")} ({error(allowed)})</span>;
}

function Proof({ first }: { first: First }) {
  const { t } = useShared();
  if (first.proof === null) return <Fact name="proof" tone="quiet" value={t("proof_missing")}>{first.unproved}</Fact>;
  const which = first.wrong.length === 2 ? "proof_both" : first.wrong.length ? `proof_${first.wrong[0]}` : "proof_none";
  const [baseline, candidate] = first.proof.map(real);
  return (
    <Fact name="proof" tone={first.wrong.length ? "bad" : "good"} value={t(which)}>
      <span title={t("proof_how")}>float64: {t("candidate")} {error(candidate)} · {t("baseline")} {error(baseline)}</span>
    </Fact>
  );
}

function Counts() {
  const { page, t } = useShared();
  const parts = Object.entries(page.counts);
  const total = parts.reduce((sum, [, held]) => sum + held, 0);
  if (!parts.length) return null;
  return (
    <div class="counts">
      <div class="bar" aria-hidden="true">
        {parts.map(([status, held]) => <i key={status} style={{ flexGrow: Math.max(held, total / 200), background: statusColour(status) }} />)}
      </div>
      <p>
        <b>{count(page.total_calls)} {t("calls")}</b>
        {parts.map(([status, held]) => (
          <span key={status}><i class="dot" style={{ background: statusColour(status) }} />{count(held)} {t(status)}</span>
        ))}
      </p>
    </div>
  );
}
