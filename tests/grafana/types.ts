// What our dashboards may consist of, by Grafana's own types: every property known, every word one of
// Grafana's. The schema package types neither Prometheus' queries and annotations nor which options
// belong to which kind of panel: both are joined here.
import type { DataQuery } from "@grafana/schema";
import type * as dashboard from "./node_modules/@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen";
import type * as heatmap from "./node_modules/@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as stat from "./node_modules/@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as timeline from "./node_modules/@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as history from "./node_modules/@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen";
import type * as table from "./node_modules/@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as lines from "./node_modules/@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has texts where TypeScript has enums: "fixed" for FieldColorModeId.Fixed.
type Plain<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends number | boolean | null | undefined
      ? T
      : T extends Array<infer Item>
        ? Plain<Item>[]
        : { [Key in keyof T]: Plain<T[Key]> };

type PrometheusQuery = Plain<Pick<DataQuery, "refId">> & {
  datasource: dashboard.DataSourceRef;
  expr: string;
  legendFormat: string;
  format: "time_series" | "table" | "heatmap";
  instant: boolean;
  range: boolean;
};

type PanelOf<Kind extends string, Options, Custom> = Plain<
  Omit<dashboard.Panel, "type" | "options" | "fieldConfig" | "targets">
> & {
  type: Kind;
  title: string;
  description: string;
  options: Plain<Options>;
  targets: PrometheusQuery[];
  fieldConfig: {
    defaults: Plain<Omit<dashboard.FieldConfig, "custom">> & { unit: string; custom?: Plain<Custom> };
    overrides: Plain<dashboard.FieldConfigSource["overrides"]>;
  };
};

type AnyPanel =
  | PanelOf<"heatmap", heatmap.Options, heatmap.FieldConfig>
  | PanelOf<"stat", stat.Options, never>
  | PanelOf<"state-timeline", timeline.Options, timeline.FieldConfig>
  | PanelOf<"status-history", history.Options, history.FieldConfig>
  | PanelOf<"table", table.Options, table.FieldConfig>
  | PanelOf<"timeseries", lines.Options, lines.FieldConfig>
  | Plain<dashboard.RowPanel>;

type PrometheusAnnotation = Plain<Omit<dashboard.AnnotationQuery, "target">> & {
  target: { refId: string; expr: string; interval: string };
  titleFormat: string;
  textFormat: string;
};

export type PrometheusDashboard = Plain<Omit<dashboard.Dashboard, "panels" | "annotations">> & {
  panels: AnyPanel[];
  annotations: { list: PrometheusAnnotation[] };
};
