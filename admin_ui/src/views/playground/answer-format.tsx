import { Field } from "../../parts/basics";

export type AnswerFormat = "text" | "json" | "schema";

export interface AnswerSettings {
  format: AnswerFormat;
  /** The schema as typed, for `format` "schema". */
  schema: string;
}

const FORMATS: Record<AnswerFormat, string> = { text: "any text", json: "a JSON object", schema: "JSON matching a schema" };
const EXAMPLE = '{"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"], "additionalProperties": false}';

export function answerFormat(text: string | null): AnswerFormat {
  return text === "json" || text === "schema" ? text : "text";
}

/** The `response_format` part of the request. Requires that `schemaProblem` returned null. */
export function responseFormat({ format, schema }: AnswerSettings): Record<string, unknown> {
  if (format === "text") return {};
  if (format === "json") return { response_format: { type: "json_object" } };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } };
}

/** Why the request cannot be sent yet, or null. The server decides whether it supports the schema. */
export function schemaProblem({ format, schema }: AnswerSettings): string | null {
  if (format !== "schema") return null;
  if (schema.trim() === "") return "No schema yet.";
  try {
    const parsed: unknown = JSON.parse(schema);
    const isObject = typeof parsed === "object" && parsed !== null && !Array.isArray(parsed);
    return isObject ? null : "The schema must be a JSON object.";
  } catch (error) {
    return `Not valid JSON: ${error instanceof Error ? error.message : String(error)}`;
  }
}

export function FormatField({ value, onChange }: { value: AnswerFormat; onChange: (format: AnswerFormat) => void }) {
  return (
    <label class="number-field format-field">
      <span class="muted small">Answer format</span>
      <select class="select" value={value} onChange={(event) => onChange(answerFormat(event.currentTarget.value))}>
        {Object.entries(FORMATS).map(([format, title]) => (
          <option key={format} value={format}>
            {title}
          </option>
        ))}
      </select>
    </label>
  );
}

export function SchemaField({ settings, onChange }: { settings: AnswerSettings; onChange: (schema: string) => void }) {
  return (
    <Field
      label="JSON schema"
      hint="Every answer follows this schema. The models do not see it, so describe in the prompt what you expect."
      error={settings.schema.trim() === "" ? null : schemaProblem(settings)}
    >
      <textarea class="textarea mono" rows={4} spellcheck={false} placeholder={EXAMPLE} value={settings.schema} onInput={(event) => onChange(event.currentTarget.value)} />
    </Field>
  );
}
