{{- /* Two operators that look after the same jobs would undo each other's work: refuse the second one, by name. */ -}}
{{- define "topkube.checkOthers" -}}
{{- $mine := .Values.namespaces -}}
{{- range (lookup "apps/v1" "Deployment" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $named := and (eq (get $labels "app.kubernetes.io/name") "topkube") (eq (get $labels "app.kubernetes.io/component") "operator") -}}
{{- $own := and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq .metadata.namespace $.Release.Namespace) -}}
{{- if and $named (not $own) -}}
{{- $who := printf "%s/%s" .metadata.namespace .metadata.name -}}
{{- $theirs := get (.metadata.annotations | default dict) "topkube.dev/namespaces" | default "*" -}}
{{- if or (eq $theirs "*") (not $mine) -}}
{{- fail (printf "another operator, %s, looks after %s. Likely cause: TopKube is installed already. Next: upgrade that release, or give both different lists with --set namespaces={...}" $who (ternary "all namespaces" (printf "namespaces %s" $theirs) (eq $theirs "*"))) -}}
{{- end -}}
{{- range (splitList "," $theirs) -}}
{{- if has . $mine -}}
{{- fail (printf "another operator, %s, looks after namespace %s already. Next: leave it out of `namespaces`, or out of the other release" $who .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
