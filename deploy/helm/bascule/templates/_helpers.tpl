{{- define "bascule.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "bascule.selector" -}}
app.kubernetes.io/name: bascule
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
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
