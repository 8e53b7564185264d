import { call } from "../../api/client";
import { SkeletonRows, View } from "../../parts/states";
import { usePolled } from "../../state/polled";
import { session } from "../../state/session";

interface ConfigItem {
  name: string;
  value: string;
  source: string;
  help: string;
}

/** The configuration in force. It is changed where the server is started, so it is only shown here. */
export function Settings() {
  const config = usePolled("config", async (signal) => (await call<{ data: ConfigItem[] }>("GET", "/v1/config", { signal })).data.data, 0);
  return (
    <>
      <div class="page-head">
        <h1>Settings</h1>
        <p>
          loraserve {session.value?.version}, serving {session.value?.model}. Set by flags, LORASERVE_ variables or a --config file; a restart takes them in.
        </p>
      </div>
      <View of={config} skeleton={<SkeletonRows rows={16} />}>
        {(items) => (
          <div class="panel scroll-x">
            <table class="table is-cards">
              <caption class="visually-hidden">Settings</caption>
              <thead>
                <tr>
                  <th>Setting</th>
                  <th>Value</th>
                  <th>From</th>
                </tr>
              </thead>
              <tbody>
                {items.map((item) => (
                  <tr key={item.name}>
                    <th scope="row" title={item.help}>
                      <code>--{item.name}</code>
                    </th>
                    <td class="is-span-2" data-label="Value">
                      <code>{item.value}</code>
                    </td>
                    <td data-label="From" class={item.source === "default" ? "muted" : "strong"}>{item.source}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </View>
    </>
  );
}
