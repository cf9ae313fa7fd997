# mega as an image: docker build -t mega . ; on NVIDIA GPUs: docker build --build-arg TORCH=cuda -t mega .
# What is installed is locked by hashes (constraints/). Work on /work: docker run --rm -it -v "$PWD:/work" mega doctor
# Extras are installed on top, in an image FROM this one, from a clone: RUN pip install '/clone[serve]'
FROM python:3.12-slim

ARG TORCH=cpu
COPY constraints /constraints
# Torch without CUDA is on PyTorch's own index alone, unless a mirror has it; with CUDA it is on PyPI.
RUN locked="pip install --no-cache-dir --require-hashes --no-deps --only-binary :all:" && \
    $locked -r /constraints/core.txt && \
    ($locked -r /constraints/$TORCH.txt || \
     $locked --index-url https://download.pytorch.org/whl/cpu -r /constraints/$TORCH.txt)

COPY . /source
RUN pip install --no-cache-dir --no-deps --no-build-isolation /source && rm -rf /source /constraints

WORKDIR /work
ENTRYPOINT ["mega"]
