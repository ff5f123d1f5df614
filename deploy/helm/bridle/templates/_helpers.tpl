{{- define "bridle.name" -}}
{{- printf "%s-server" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "bridle.selector" -}}
app.kubernetes.io/name: bridle
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "bridle.labels" -}}
{{ include "bridle.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "bridle.scheme" -}}
{{- if .Values.tlsSecret }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}
