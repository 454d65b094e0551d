//go:build tools

// Package tools pins the tools of `make check-deploy`, and the modules with the resource definitions of the Prometheus operator and of
// the Spark operator.
package tools

import (
	_ "github.com/kubeflow/spark-operator/v2"
	_ "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"
)
