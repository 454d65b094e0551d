#!/bin/sh
# Entry point of the image of the pipelines. Spark on Kubernetes, and so the Spark operator, starts a pod with the argument `driver` or
# `executor` and says the rest in variables. With all other arguments, the image runs the command `bascule`.
set -eu
case "${1-}" in
driver)
    shift
    exec spark-submit --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
    ;;
executor)
    jars=${SPARK_HOME:-$(python3 -c 'import pyspark; print(pyspark.__path__[0])')}/jars
    set --
    number=0
    while option=$(printenv "SPARK_JAVA_OPT_$number"); do
        set -- "$@" "$option"
        number=$((number + 1))
    done
    exec java "$@" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
        -cp "${SPARK_CONF_DIR:+$SPARK_CONF_DIR:}${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$jars/*${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
*)
    exec bascule "$@"
    ;;
esac
