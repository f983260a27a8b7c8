# fedsim on the CPU: docker build -t fedsim . ; docker run --rm -v "$PWD/outputs:/work/outputs" fedsim strategy=fedawe rounds=20
FROM python:3.11-slim

# PyTorch's builds for the CPU: of the same version pip prefers 2.x+cpu to 2.x, so no CUDA package is fetched.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

COPY . /src
RUN pip install /src && rm -rf /src && useradd --create-home --uid 1000 fedsim && install -d -o fedsim /work

USER fedsim
WORKDIR /work
ENTRYPOINT ["fedsim"]
CMD ["--help"]
