# mega as an image: docker build -t mega . ; on NVIDIA GPUs: docker build --build-arg TORCH=cuda -t mega .
# What is installed is locked by hashes (constraints/). Work on /work: docker run --rm -it -v "$PWD:/work" mega doctor
FROM python:3.12-slim

ARG TORCH=cpu
COPY constraints /constraints
RUN locked="pip install --no-cache-dir --require-hashes --no-deps --only-binary :all:" && \
    $locked -r /constraints/core.txt && \
    ($locked -r /constraints/$TORCH.txt || \
     $locked --index-url https://download.pytorch.org/whl/$TORCH -r /constraints/$TORCH.txt)

COPY . /source
RUN pip install --no-cache-dir --no-deps /source && rm -rf /source /constraints

WORKDIR /work
ENTRYPOINT ["mega"]
