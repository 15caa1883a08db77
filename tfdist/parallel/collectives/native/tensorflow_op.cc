// TensorFlow's op TfdistCollective: one call of tfdist_run.
//
// The op is registered when TensorFlow loads this library (tf.load_op_library). In a process without
// TensorFlow, the library works without it.
//
// The kernel blocks its thread until the call is done. TensorFlow's C interface has asynchronous
// kernels, but their callback must not be kept after the kernel has returned.
//
// The op is stateful, so that within a function, TensorFlow runs these ops in the order of the
// program, which is the same in all processes.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <vector>

#include "tensorflow_c_api.h"
#include "transport.h"

namespace tfdist {
namespace {

TensorFlow tf;

// Finds TensorFlow's functions; returns whether all of them are there.
bool FindTensorFlow() {
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (!library) return false;
#define TFDIST_FIND(result, name, parameters)                                 \
  tf.name = reinterpret_cast<result(*) parameters>(dlsym(library, "TF_" #name)); \
  if (!tf.name) return false;
  TFDIST_TENSORFLOW_FUNCTIONS(TFDIST_FIND)
#undef TFDIST_FIND
  return true;
}

class Status {
 public:
  Status() : status_(tf.NewStatus()) {}
  ~Status() { tf.DeleteStatus(status_); }
  TF_Status* get() { return status_; }
  bool ok() const { return tf.GetCode(status_) == kOk; }

 private:
  TF_Status* const status_;
};

struct Kernel {
  int64_t communicator = 0;
  int64_t size = 1;
  int64_t collective = 0;
  int64_t reduction = 0;
  int64_t factors = 0;  // of the inputs, after the tensors: 0 or 1
  std::string name;
};

void* Create(TF_OpKernelConstruction* construction) {
  auto* kernel = new Kernel;
  Status status;
  auto read = [&](const char* name, int64_t* value) {
    if (status.ok()) tf.OpKernelConstruction_GetAttrInt64(construction, name, value, status.get());
  };
  read("communicator", &kernel->communicator);
  read("size", &kernel->size);
  read("collective", &kernel->collective);
  read("reduction", &kernel->reduction);
  read("M", &kernel->factors);
  int32_t count = 0, bytes = 0;
  if (status.ok()) {
    tf.OpKernelConstruction_GetAttrSize(construction, "call", &count, &bytes, status.get());
  }
  if (status.ok()) {
    kernel->name.resize(bytes);
    tf.OpKernelConstruction_GetAttrString(construction, "call", &kernel->name[0], bytes,
                                          status.get());
  }
  if (!status.ok()) tf.OpKernelConstruction_Failure(construction, status.get());
  return kernel;
}

void Delete(void* kernel) { delete static_cast<Kernel*>(kernel); }

// The tensors of a call; deletes them in the end.
struct Tensors {
  std::vector<TF_Tensor*> owned;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<size_t> input_bytes, output_bytes;
  int dtype = 0;

  ~Tensors() {
    for (TF_Tensor* tensor : owned) tf.DeleteTensor(tensor);
  }
};

// Returns the shape of an output.
std::vector<int64_t> OutputShape(const Kernel& kernel, TF_Tensor* input) {
  std::vector<int64_t> shape;
  if (kernel.collective == TFDIST_ALL_GATHER) shape.push_back(kernel.size);
  const int rank = tf.NumDims(input);
  for (int i = kernel.collective == TFDIST_REDUCE_SCATTER ? 1 : 0; i < rank; ++i) {
    shape.push_back(tf.Dim(input, i));
  }
  return shape;
}

// Takes an input, and the output of the same number: the same memory where TensorFlow allows it.
void Take(const Kernel& kernel, TF_OpKernelContext* context, int i, Tensors* tensors,
          Status* status) {
  TF_Tensor* input = nullptr;
  tf.GetInput(context, i, &input, status->get());
  if (!status->ok()) return;
  const std::vector<int64_t> shape = OutputShape(kernel, input);
  const size_t bytes = tf.TensorByteSize(input);
  tensors->dtype = tf.TensorType(input);
  TF_Tensor* output = nullptr;
  int forwarded = -1;
  size_t output_bytes = bytes;
  if (kernel.collective == TFDIST_ALL_REDUCE) {
    tf.DeleteTensor(input);  // with a second owner, its memory would not be forwarded
    output = tf.ForwardInputOrAllocateOutput(context, &i, 1, i, shape.data(), shape.size(),
                                             &forwarded, status->get());
    if (status->ok() && forwarded < 0) tf.GetInput(context, i, &input, status->get());
    if (status->ok() && forwarded < 0) tensors->owned.push_back(input);
  } else {
    tensors->owned.push_back(input);
    if (kernel.collective == TFDIST_ALL_GATHER) output_bytes = bytes * kernel.size;
    if (kernel.collective == TFDIST_REDUCE_SCATTER) output_bytes = bytes / kernel.size;
    output = tf.AllocateOutput(context, i, tensors->dtype, shape.data(), shape.size(), output_bytes,
                               status->get());
  }
  if (output) tensors->owned.push_back(output);
  if (!status->ok()) return;
  tensors->inputs.push_back(tf.TensorData(forwarded < 0 ? input : output));
  tensors->outputs.push_back(tf.TensorData(output));
  tensors->input_bytes.push_back(bytes);
  tensors->output_bytes.push_back(output_bytes);
}

void Compute(void* data, TF_OpKernelContext* context) {
  const Kernel& kernel = *static_cast<Kernel*>(data);
  Status status;
  Tensors tensors;
  const int count = tf.NumInputs(context) - static_cast<int>(kernel.factors);
  double factor = 1;
  if (kernel.factors) {
    TF_Tensor* scalar = nullptr;
    tf.GetInput(context, count, &scalar, status.get());
    if (status.ok()) {
      memcpy(&factor, tf.TensorData(scalar), sizeof factor);
      tf.DeleteTensor(scalar);
    }
  }
  for (int i = 0; i < count && status.ok(); ++i) Take(kernel, context, i, &tensors, &status);
  if (status.ok()) {
    char error[4096];
    if (tfdist_run(kernel.communicator, static_cast<int>(kernel.collective), tensors.dtype,
                   static_cast<int>(kernel.reduction), factor, kernel.name.c_str(),
                   tensors.inputs.data(), tensors.outputs.data(), tensors.input_bytes.data(),
                   tensors.output_bytes.data(), count, error, sizeof error)) {
      // UNAVAILABLE would say more, but TensorFlow replaces it in operations other than its own.
      tf.SetStatus(status.get(), kAborted, error);
    }
  }
  if (!status.ok()) tf.OpKernelContext_Failure(context, status.get());
}

void Register() {
  TF_OpDefinitionBuilder* definition = tf.NewOpDefinitionBuilder("TfdistCollective");
  tf.OpDefinitionBuilderAddAttr(definition, "N: int >= 1");
  tf.OpDefinitionBuilderAddAttr(definition, "M: int >= 0");
  tf.OpDefinitionBuilderAddAttr(definition, "T: {float, double, int32, int64, bfloat16, half}");
  tf.OpDefinitionBuilderAddAttr(definition, "communicator: int");
  tf.OpDefinitionBuilderAddAttr(definition, "size: int");
  tf.OpDefinitionBuilderAddAttr(definition, "collective: int");
  tf.OpDefinitionBuilderAddAttr(definition, "reduction: int");
  tf.OpDefinitionBuilderAddAttr(definition, "call: string");
  tf.OpDefinitionBuilderAddInput(definition, "values: N * T");
  tf.OpDefinitionBuilderAddInput(definition, "factors: M * double");  // scalars
  tf.OpDefinitionBuilderAddOutput(definition, "results: N * T");
  tf.OpDefinitionBuilderSetIsStateful(definition, true);
  // The caller sets the shapes of the results; the C interface cannot read attributes here.
  tf.OpDefinitionBuilderSetShapeInferenceFunction(definition, tf.ShapeInferenceContextSetUnknownShape);
  Status status;
  tf.RegisterOpDefinition(definition, status.get());
  if (status.ok()) {
    tf.RegisterKernelBuilder("TfdistCollective",
                             tf.NewKernelBuilder("TfdistCollective", "CPU", Create, Compute, Delete),
                             status.get());
  }
  if (!status.ok()) fprintf(stderr, "tfdist: op TfdistCollective: %s\n", tf.Message(status.get()));
}

[[maybe_unused]] const bool registered = FindTensorFlow() && (Register(), true);

}  // namespace
}  // namespace tfdist
