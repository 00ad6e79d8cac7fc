{{- /* Values that have no effect because of another value, or that Kubernetes refuses later: refuse them, by name. */ -}}
{{- define "topkube.checkValues" -}}
{{- $protection := .Values.metrics.protection -}}
{{- if not $protection.tls -}}
{{- if ne $protection.authentication "none" -}}
{{- fail "metrics.protection.authentication needs metrics.protection.tls=true: tokens are secrets" -}}
{{- end -}}
{{- range list "secretName" "scrapeTlsConfig" -}}
{{- if get $protection . -}}
{{- fail (printf "metrics.protection.%s needs metrics.protection.tls=true: without it, the metrics have no TLS" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $protection.authentication "none" -}}
{{- range list "readers" "scrapeAuthorization" -}}
{{- if get $protection . -}}
{{- fail (printf "metrics.protection.%s needs metrics.protection.authentication=kubernetes: without it, the metrics need no token" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.webhookFrom (not .Values.networkPolicy.enabled) -}}
{{- fail "networkPolicy.webhookFrom needs networkPolicy.enabled=true: without it, everyone may call the webhook" -}}
{{- end -}}
{{- if and .Values.webhook.certManager.issuerRef (not .Values.webhook.certManager.enabled) -}}
{{- fail "webhook.certManager.issuerRef needs webhook.certManager.enabled=true: without it, the operator makes its own certificate" -}}
{{- end -}}
{{- $cache := .Values.cache.node -}}
{{- if and $cache.namespaces (not $cache.enabled) -}}
{{- fail "cache.node.namespaces needs cache.node.enabled=true: without it, no node has a cache, and jobs with medium Node wait" -}}
{{- end -}}
{{- $budget := .Values.podDisruptionBudget -}}
{{- $replicas := int .Values.replicas -}}
{{- if and $budget.enabled (gt $replicas 1) -}}
{{- $least := toString $budget.minAvailable -}}
{{- $staying := ternary (ceil (divf (mulf (trimSuffix "%" $least) $replicas) 100)) $least (hasSuffix "%" $least) | int -}}
{{- if ge $staying $replicas -}}
{{- fail (printf "podDisruptionBudget.minAvailable=%s of %d replicas blocks every drain. Next: set it below the number of replicas" $least $replicas) -}}
{{- end -}}
{{- end -}}
{{- if $cache.enabled -}}
{{- range $cache.namespaces -}}
{{- $volume := lookup "v1" "PersistentVolume" "" (printf "topkube-node-cache-%s" .) -}}
{{- $wanted := printf "%s/%s" $cache.hostPath . -}}
{{- $path := dig "spec" "hostPath" "path" $wanted (default dict $volume) -}}
{{- if ne $path $wanted -}}
{{- fail (printf "the cache of namespace %s is in %s, and the path of a volume cannot be changed. Next: remove the namespace from cache.node.namespaces, upgrade, and add it again with the new cache.node.hostPath" . $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
