import type { components } from "./schema";

/** Short names for the API's response types, which are generated from its OpenAPI document. */
type Schemas = components["schemas"];

export type AdapterItem = Schemas["AdapterItem"];
export type AdapterDetail = Schemas["AdapterDetail"];
export type AliasItem = Schemas["AliasItem"];
export type VersionItem = Schemas["VersionItem"];
export type UploadItem = Schemas["UploadItem"];
export type ReportItem = Schemas["ReportItem"];
export type CheckItem = Schemas["CheckItem"];
export type KeyItem = Schemas["KeyItem"];
export type CreatedKey = Schemas["CreatedKey"];
export type TenantItem = Schemas["TenantItem"];
export type LiveView = Schemas["LiveView"];
export type EngineItem = Schemas["EngineItem"];
export type SeriesView = Schemas["SeriesView"];
export type RequestItem = Schemas["RequestItem"];
export type AuditItem = Schemas["AuditItem"];
export type UsageReport = Schemas["UsageReport"];
export type UsageRow = UsageReport["data"][number];
export type ClassifyResponse = Schemas["ClassifyResponse"];
export type RerankResponse = Schemas["RerankResponse"];
export type ModelCard = Schemas["ModelCard"];
export type ConfigItem = Schemas["ConfigItem"];
export type CertificateView = Schemas["CertificateView"];

/** One page of a list. */
export interface Page<T> {
  data: T[];
  next_cursor: string | null;
}
