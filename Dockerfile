# One image for gateway, router and worker: the command says which.
#   docker build -t headrace .                                                the package index's torch (with CUDA on x86-64: gigabytes)
#   docker build --build-arg TORCH_INDEX=<PyTorch's CPU index> -t headrace .  a small CPU-only torch
#   docker build --build-context wheels=<folder> -t headrace .                wheels from a folder first

# replaced by `--build-context wheels=…`
FROM scratch AS wheels
COPY LICENSE /

FROM python:3.11-slim AS build
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH
WORKDIR /src
# what changes rarely first: these layers survive an edit of the sources
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip install --no-deps --find-links /wheels ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
RUN --mount=type=bind,from=wheels,target=/wheels \
    python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt && \
    pip install --find-links /wheels -c constraints.txt -r requirements.txt
COPY services services
COPY shared shared
RUN pip install --no-deps .

FROM python:3.11-slim
# CPU workers compile their operators for the machine they run on
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home headrace && install -d -o headrace -g headrace -m 0700 /data
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH PYTHONUNBUFFERED=1 HEADRACE_STATE_DIR=/data XDG_CACHE_HOME=/data/cache HEADRACE_HOST=0.0.0.0 HEADRACE_METRICS_PORT=9100
USER headrace
WORKDIR /home/headrace
VOLUME /data
EXPOSE 8000 9100
ENTRYPOINT ["headrace"]
CMD ["--help"]
