{{- define "bascule.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "bascule.selector" -}}
app.kubernetes.io/name: bascule
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* The labels of a driver that Spark starts, and none of its executors. */ -}}
{{- define "bascule.sparkDriver" -}}
{{ include "bascule.selector" . }}
spark-role: driver
{{- end }}

{{- define "bascule.labels" -}}
{{ include "bascule.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "bascule.image" -}}
{{- with index .root.Values.image .component -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.root.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "bascule.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "bascule.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* HOST:PORT of each broker. */ -}}
{{- define "bascule.addresses" -}}
{{- $name := include "bascule.name" . -}}
{{- $addresses := list -}}
{{- range until (int .Values.broker.replicas) -}}
{{- $addresses = append $addresses (printf "%s-broker-%d.%s-brokers.%s.svc.%s:%d" $name . $name $.Release.Namespace $.Values.broker.clusterDomain (int $.Values.broker.ports.amqp)) -}}
{{- end -}}
{{- $addresses | toJson -}}
{{- end }}

{{- /* The names of the admin server in the cluster, of each pod and of their Service, besides broker.adminHosts and admin.hosts of the configuration. */ -}}
{{- define "bascule.adminHosts" -}}
{{- $service := printf "%s-brokers" (include "bascule.name" .) -}}
{{- $names := list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s.%s.svc.%s" $service .Release.Namespace .Values.broker.clusterDomain) -}}
{{- $hosts := concat .Values.broker.adminHosts (dig "admin" "hosts" list (fromToml .Values.config)) | uniq -}}
{{- range $names -}}
{{- $hosts = concat $hosts (list . (printf "$(POD_NAME).%s" .)) -}}
{{- end -}}
{{- $hosts | toJson -}}
{{- end }}

{{- define "bascule.adminScheme" -}}
{{ ternary "HTTPS" "HTTP" (ne .Values.broker.adminTlsSecret "") }}
{{- end }}

{{- /* Environment of broker and pipelines. */ -}}
{{- define "bascule.environment" -}}
- name: BASCULE_KAFKA__BOOTSTRAP_SERVERS
  value: {{ .Values.kafka.bootstrapServers | quote }}
- name: BASCULE_EMBEDDED__DATA_DIR
  value: /var/lib/bascule
{{- end }}

{{- define "bascule.pipelinesEnvironment" -}}
{{ include "bascule.environment" . }}
{{- if .Values.pipelines.metrics.enabled }}
- {name: BASCULE_PIPELINES__METRICS_HOST, value: "0.0.0.0"}
- {name: BASCULE_PIPELINES__METRICS_PORT, value: {{ .Values.pipelines.metrics.port | quote }}}
{{- end }}
{{- with .Values.pipelines.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "bascule.pipelinesStartup" -}}
httpGet: {path: /livez, port: metrics}
periodSeconds: 2
timeoutSeconds: 5
failureThreshold: 150
{{- end }}

{{- /* /livez fails if the driver has made no progress for five minutes. */ -}}
{{- define "bascule.pipelinesLiveness" -}}
httpGet: {path: /livez, port: metrics}
periodSeconds: 10
timeoutSeconds: 5
failureThreshold: 6
{{- end }}

{{- define "bascule.pipelinesVolumes" -}}
{{ include "bascule.volumes" . }}
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.pipelines.scratchSize }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.pipelines.sharedMemorySize }}}
{{- end }}

{{- define "bascule.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "bascule.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "bascule.mounts" -}}
- {name: config, mountPath: /etc/bascule, readOnly: true}
- {name: scratch, mountPath: /var/lib/bascule}
- {name: tmp, mountPath: /tmp}
{{- range .Values.existingSecrets }}
- {name: {{ printf "secret-%s" . | replace "." "-" | trunc 63 | trimSuffix "-" | quote }}, mountPath: {{ printf "/run/secrets/bascule/%s" . | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "bascule.volumes" -}}
- name: config
  configMap: {name: {{ include "bascule.name" . }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- range .Values.existingSecrets }}
- name: {{ printf "secret-%s" . | replace "." "-" | trunc 63 | trimSuffix "-" | quote }}
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}
