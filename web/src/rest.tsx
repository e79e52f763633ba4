// Calls without a partner, what the runs are, what was not seen.
import { count } from "./format.ts";
import { useShared } from "./state.tsx";

export function Structure() {
  const { page, t } = useShared();
  if (!page.items.length && !page.structure.length) return null;
  const more = page.items_total - page.items.length;
  return (
    <section id="structure" aria-labelledby="structure-title">
      <h2 id="structure-title">{page.kind === "compare" ? t("unmatched_of") : t("structure")} <span class="muted">{count(page.items_total)}</span></h2>
      {page.structure.map((line) => <p>{line}</p>)}
      {page.items.length > 0 && (
        <div class="list">
          <table>
            <tbody>
              {page.items.map((item) => (
                <tr>
                  <td class="kind">{t(item.kind)}</td>
                  <td><span class="name">{item.call}</span>{item.module && <span class="muted name"> {item.module}</span>}</td>
                  <td class="muted">{item.step >= 0 && `${t("step")} ${item.step}, ${t("rank")} ${item.rank}`}</td>
                  <td>{item.detail}{item.suggestion && <span class="muted"> {t("nearest")}: <span class="name">{item.suggestion}</span></span>}</td>
                  <td class="muted name">{item.source && item.source[0] && `${item.source[0]}:${item.source[1]}`}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {more > 0 && <p class="small muted">{count(more)} {t("more_items")}</p>}
    </section>
  );
}

export function Rest() {
  const { page, t } = useShared();
  return (
    <section aria-labelledby="rest">
      <h2 id="rest">{t("rest")}</h2>
      <dl class="sides">
        {page.sides.map((side) => (
          <><dt>{t(side.role)}</dt><dd>{side.coverage || <><span class="name">{side.path}</span> <span class="muted">{side.facts.join(" · ")}</span></>}</dd></>
        ))}
      </dl>
      {page.verdict.lines.map((line) => <p class="small">{line}</p>)}
      {page.notes.length > 0 && <ul class="notes small">{page.notes.map((note) => <li>{note}</li>)}</ul>}
    </section>
  );
}
